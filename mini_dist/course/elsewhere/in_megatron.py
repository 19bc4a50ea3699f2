"""The run in Megatron-core 0.16: tensor and pipeline parallel, with its own layers and 1F1B.

It is written for CUDA, and `OnCPU` is all it takes to do without.  Its model is its own, so our
weights are put into it, cut as it cuts them.
"""

from __future__ import annotations

import logging

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mini_dist.model.gpt import GPT

from .kept import kept
from .run import CONFIG, adamw, measure, name_axes


class OnCPU(TorchFunctionMode):
    """Answer on the CPU what Megatron-core asks of CUDA, and create its CUDA tensors here."""

    def __enter__(self):
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda *_: None
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def grid(tp, pp, micro, batches, group):
    logging.disable(logging.WARNING)
    with OnCPU():
        from megatron.core import parallel_state as ranks
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        ranks.destroy_model_parallel()  # left over from an earlier run
        initialize_rng_tracker(
            inference_rng_tracker=True
        )  # the default one asks CUDA for its state
        ranks.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        dp = ranks.get_data_parallel_group(with_context_parallel=True)
        name_axes(
            group,
            tp=ranks.get_tensor_model_parallel_group(),
            pp=ranks.get_pipeline_model_parallel_group(),
            dp=dp,
        )
        config = transformer_config(tp, pp, finalize_model_grads)
        model = gpt_model(config, ranks)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = adamw(model.parameters())
        seq_len, losses = CONFIG.seq_len, []
        # its attention takes a mask that is true where a score is hidden, [1, 1, S, S]
        mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool).triu(1)

        def forward(micro_batches, model):
            inputs, targets = next(micro_batches)
            positions = torch.arange(seq_len).expand_as(inputs)
            out = model(inputs, positions, mask, labels=targets)  # losses [b, S], not logits
            return out, lambda out: (out.mean(), {"loss": out.detach().mean()})

        for micro_batches in batches(dp.rank(), dp.size(), micro):
            ddp.zero_grad_buffer()
            reports = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micro_batches),
                model=[ddp],
                num_microbatches=len(micro_batches),
                seq_length=seq_len,
                micro_batch_size=micro,
            )
            for parameter in model.parameters():  # gradients are in a buffer of its DDP
                parameter.grad = parameter.main_grad
            optimizer.step()
            optimizer.zero_grad()  # else autograd adds to the buffer, and so does the DDP
            known = [report["loss"].item() for report in reports]  # on the last stage only
            losses.append(sum(known) / len(known) if known else None)
        return losses


def transformer_config(tp, pp, finalize_model_grads):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=CONFIG.num_layers,
        hidden_size=CONFIG.d_model,
        ffn_hidden_size=CONFIG.d_ffn,
        num_attention_heads=CONFIG.num_heads,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,  # 0.1 where nothing is said (transformer_config.py)
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
        # What its fused kernels for CUDA would do is done by plain torch:
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def gpt_model(config, ranks):
    """This rank's part of Megatron's GPTModel, with the weights of ours."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=CONFIG.vocab_size,
        max_sequence_length=CONFIG.seq_len,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
    )
    stage, stages = ranks.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size
    index, size = ranks.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
    whole = megatron_weights(GPT(CONFIG), first=stage * CONFIG.num_layers // stages)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(cut(name, whole[name], index, size))
    return model


def megatron_weights(gpt, first):
    """Our weights under Megatron's names; `first` is the number of the stage's first layer."""
    whole = {
        "embedding.word_embeddings.weight": gpt.embed.token.weight,
        "decoder.final_layernorm.weight": gpt.head.norm.weight,
        "output_layer.weight": gpt.head.out.weight,
    }
    for number, block in enumerate(gpt.blocks[first:]):
        # of each head its rows of q, then of k, then of v
        each = (block.attn.q, block.attn.k, block.attn.v)
        qkv = [linear.weight.unflatten(0, (CONFIG.num_heads, -1)) for linear in each]
        gate_and_up = torch.stack([block.ffn.gate.weight, block.ffn.up.weight])
        layer = f"decoder.layers.{number}."
        whole |= {
            layer + "input_layernorm.weight": block.attn_norm.weight,
            layer + "self_attention.linear_qkv.weight": torch.cat(qkv, 1).flatten(0, 1),
            layer + "self_attention.linear_proj.weight": block.attn.o.weight,
            layer + "pre_mlp_layernorm.weight": block.ffn_norm.weight,
            layer + "mlp.linear_fc1.weight": gate_and_up,
            layer + "mlp.linear_fc2.weight": block.ffn.down.weight,
        }
    return whole


def cut(name, whole, index, size):
    """What tensor-parallel rank `index` has of a weight: norms whole, all else cut."""
    if "norm" in name:
        return whole
    if "linear_fc1" in name:  # gate and up, each by rows
        return whole.chunk(size, 1)[index].flatten(0, 1)
    by_columns = "linear_proj" in name or "linear_fc2" in name
    return whole.chunk(size, 1 if by_columns else 0)[index]


@kept("megatron.core")
def grids() -> list[dict]:
    return measure(
        {
            "pp 4": (grid, 1, 4, 2),
            "tp 2 x dp 2": (grid, 2, 1, 4),
            "tp 2 x pp 2": (grid, 2, 2, 2),
        }
    )

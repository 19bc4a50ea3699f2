"""Will it fit, how fast, in which layout: pure functions of a model and a layout, no torch.

    print(peak_memory(model("llama3-8b"), Layout(dp=8, zero=1)))
    print(step_time(model("llama3-8b"), Layout(dp=8, zero=1), "h100"))
    print(plan("llama3-70b", "h100", 1024, global_batch_tokens=4 * 2**20))

Read in this order:
    lines.py       an itemised answer: name, value, unit, formula, source
    parameters.py  every weight of a model, once
    models.py      GPT-2 to DeepSeek-V3 by name, and Hugging Face's config.json
    flops.py       the work, and how long 6 P T takes
    machines.py    datasheets beside measurements
    links.py       rounds, bytes and seconds of each collective algorithm
    frameworks.py  what a framework adds to the mathematics: the assumptions
    activations.py what forward keeps of a layer
    memory.py      what fills a device, under a framework that one knows from outside
    moments.py     the same for this library: its own step, moment by moment
    volume.py      what each axis sends
    kernels.py     how long the parts of a layer last
    step_time.py   what a step waits for
    planner.py     every layout, those that fit, the fastest
    export.py      a layout in the words of Megatron-LM, DeepSpeed, torchtitan, torchrun
"""

from ..config import Layout, ModelConfig
from .export import (
    deepspeed_json,
    layout_source,
    megatron_arguments,
    torchrun_line,
    torchtitan_config,
)
from .flops import forward_flops, model_flops, step_flops, training_time
from .frameworks import FRAMEWORKS, Framework, framework
from .lines import Breakdown, Line, readable
from .machines import HARDWARE, Device, Hardware, hardware
from .memory import (
    device_memory,
    layer_activations,
    micro_batches_in_flight,
    model_states,
    peak_memory,
    rank_memory,
)
from .models import MODELS, from_hugging_face, model
from .parameters import (
    num_active_parameters,
    num_parameters,
    parameter_counts,
    parameters_of_rank,
    split_layers,
)
from .planner import Candidate, Plan, plan
from .step_time import StepTime, step_time
from .volume import step_volume

__all__ = [
    "FRAMEWORKS",
    "HARDWARE",
    "MODELS",
    "Breakdown",
    "Candidate",
    "Device",
    "Framework",
    "Hardware",
    "Layout",
    "Line",
    "ModelConfig",
    "Plan",
    "StepTime",
    "deepspeed_json",
    "device_memory",
    "forward_flops",
    "framework",
    "from_hugging_face",
    "hardware",
    "layer_activations",
    "layout_source",
    "megatron_arguments",
    "micro_batches_in_flight",
    "model",
    "model_flops",
    "model_states",
    "num_active_parameters",
    "num_parameters",
    "parameter_counts",
    "parameters_of_rank",
    "peak_memory",
    "plan",
    "rank_memory",
    "readable",
    "split_layers",
    "step_flops",
    "step_time",
    "step_volume",
    "torchrun_line",
    "torchtitan_config",
    "training_time",
]

"""Will it fit, how fast, in which layout: pure functions of a model and a layout, without torch.

    print(peak_memory(model("llama3-8b"), Layout(dp=8, zero=1)))
    print(step_time(model("llama3-8b"), Layout(dp=8, zero=1), "h100"))
    print(plan("llama3-70b", "h100", 1024, global_batch_tokens=4 * 2**20))

Read in this order:
    lines.py       an itemized answer: name, value, unit, formula, source
    parameters.py  every weight of a model, once
    presets.py     models by name, GPT-2 to Kimi K2
    models.py      by name, or from Hugging Face's config.json
    flops.py       the work, and how long 6 P T takes
    devices.py     datasheets and measurements
    machines.py    devices in nodes, nodes in a network
    links.py       a link, and how long a message takes
    rounds.py      stars, trees, rings, doublings: who sends how much, and how long it takes
    costs.py       rounds, bytes and seconds of each collective algorithm
    frameworks.py  what a framework adds to the mathematics: the assumptions
    activations.py what forward saves for a layer's backward
    weight_gradients.py  the bytes of weight gradients on their way
    memory.py      what fills a device, under a framework known from outside
    moments.py     the same for this library: its own step, moment by moment, from
                   pipeline_in_flight.py, rank_sizes.py, backward_moments.py
    volume.py      what each axis sends
    collective_time.py  which links a group of the mesh uses, and how long it takes
    compression.py what compressed gradients send, and what compressing costs
    kernels.py     how long the parts of a layer take
    timed_step.py  the input of a step's time: the layout, read once
    step_time.py   what a step waits for: the sum of
                   stage_time.py, bubble.py, replica_traffic.py, optimizer_time.py
    offload.py     memory borrowed from the host and from files; the largest model on few devices
    chosen.py      which constants were chosen with which data in view
    layouts.py     the layouts that are worth trying
    planner.py     every layout, those that fit, the fastest
    plans.py       its answer, and why the winner won
    rules.py       rules of thumb of tutorials, judged by the planner
    export.py      a layout in the terms of Megatron-LM, DeepSpeed, torchtitan, torchrun
    importing.py   and back: the batch equation, and what else their configs say, in
                   from_deepspeed.py, from_megatron.py, from_torchtitan.py
"""

from ..config import Layout, ModelConfig
from .activations import kept_of_layer
from .compression import Compression, pays_below
from .devices import Device
from .export import (
    deepspeed_json,
    layout_source,
    megatron_arguments,
    torchrun_line,
    torchtitan_config,
)
from .flops import forward_flops, model_flops, step_flops, training_time
from .frameworks import FRAMEWORKS, Framework, framework
from .from_deepspeed import from_deepspeed
from .from_megatron import from_megatron
from .from_torchtitan import from_torchtitan
from .importing import Imported
from .layouts import Search, short
from .lines import Breakdown, Line, readable
from .machines import HARDWARE, Hardware, hardware
from .memory import (
    device_memory,
    layer_activations,
    micro_batches_in_flight,
    model_states,
    peak_memory,
    rank_memory,
)
from .models import from_hugging_face, model
from .offload import (
    Largest,
    file_memory,
    host_memory,
    intensity,
    largest_model,
    traffic,
)
from .parameters import (
    num_active_parameters,
    num_parameters,
    parameter_counts,
    parameters_of_rank,
    split_layers,
)
from .planner import plan
from .plans import Candidate, Plan
from .presets import MODELS
from .step_time import StepTime, step_time
from .volume import crossing_tokens, small_messages, step_volume

__all__ = [
    "FRAMEWORKS",
    "HARDWARE",
    "MODELS",
    "Breakdown",
    "Candidate",
    "Compression",
    "Device",
    "Framework",
    "Hardware",
    "Imported",
    "Largest",
    "Layout",
    "Line",
    "ModelConfig",
    "Plan",
    "Search",
    "StepTime",
    "crossing_tokens",
    "deepspeed_json",
    "device_memory",
    "file_memory",
    "forward_flops",
    "framework",
    "from_deepspeed",
    "from_hugging_face",
    "from_megatron",
    "from_torchtitan",
    "hardware",
    "host_memory",
    "intensity",
    "kept_of_layer",
    "largest_model",
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
    "pays_below",
    "peak_memory",
    "plan",
    "rank_memory",
    "readable",
    "short",
    "small_messages",
    "split_layers",
    "step_flops",
    "step_time",
    "step_volume",
    "torchrun_line",
    "torchtitan_config",
    "traffic",
    "training_time",
]

"""What every training run is told, supervised or PPO: model, adapter, optimizer, engine, where its files
go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "sgd"
]
Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys that `sft` and `ppo` share, which mean the same in both."""

    # Model
    base_model: str | None = None
    """Folder or hub name of a causal language model. None: a small Llama with random weights."""
    model_type: str = "AutoModelForCausalLM"
    """Class of transformers that loads `base_model`, such as LlamaForCausalLM."""
    revision_of_model: str | None = None
    """Branch, tag or commit of `base_model` on the hub. None: the newest."""
    overrides_of_model_config: dict[str, Any] = field(default_factory=dict)
    """Values put over the model's own configuration, or over that of the small random Llama."""
    trust_remote_code: bool = False
    """Run Python code that comes with `base_model` or the tokenizer. Off: such models are refused."""
    tokenizer: str | None = None
    """Folder or hub name. None: that of `base_model`; without a base model the built-in tokenizer of
    bytes."""
    tokenizer_type: str = "AutoTokenizer"
    """Class of transformers that loads the tokenizer."""
    chat_template: str | None = None
    """Jinja file, or its text, that writes conversations. None: the tokenizer's own."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Tokens to set on the tokenizer: bos_token, eos_token, unk_token, pad_token."""

    # Adapters
    adapter: Literal["lora", "qlora"] | None = None
    """Train low-rank matrices beside frozen weights (LoRA), which qlora keeps in 4 bits. PPO takes the frozen
    weights as reference."""
    load_in_4bit: bool = False
    """Hold the frozen weights as 4-bit NormalFloat; goes with `adapter: qlora`."""
    load_in_8bit: bool = False
    """Hold the frozen weights in 8 bits (LLM.int8, bitsandbytes); goes with `adapter: lora`."""
    lora_r: int = 8
    """Rank of the added matrices."""
    lora_alpha: int = 16
    """Scale: the added product counts `lora_alpha / lora_r`."""
    lora_target_linear: bool = False
    """Adapt every linear layer except the output head."""
    lora_target_modules: list[str] | str | None = None
    """Names of the layers to adapt, such as q_proj, or a regular expression that whole names must match."""

    lora_target_parameters: list[str] | None = None
    """Names of parameters to adapt that are no layer of their own, such as the experts of a mixture."""
    lora_modules_to_save: list[str] | None = None
    """Modules that are trained whole beside the adapter and saved with it, such as embed_tokens and
    lm_head."""
    lora_rank_stabilized: bool = False
    """Scale the added product by `lora_alpha / sqrt(lora_r)` (rsLoRA)."""
    unfrozen_parameters: list[str] = field(default_factory=list)
    """Regular expressions that names of parameters begin with, dots taken literally: only parameters with a
    match are trained. Empty: all."""

    # Optimizer
    optimizer: Optimizer = "adamw_torch"
    """Update rule; adamw_bnb_8bit keeps its state in 8 bits (bitsandbytes), adamw_torch_8bit and 4bit in 8 or
    4 (torchao)."""
    lr_scheduler: Schedule = "cosine"
    """Shape of the learning rate over the run; cosine and linear end at 0."""
    learning_rate: float = 1e-3
    """Highest learning rate. The default suits the small random Llama; fine-tuning takes 1e-5 to 2e-4, PPO
    1e-6 to 1e-5."""
    warmup_steps: int | float = 0
    """Steps in which the learning rate rises from 0, or a share of the run below 1."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of AdamW's second moment."""
    max_grad_norm: float = 1.0
    """Bound of the gradient's norm over all ranks. 0: measured, never clipped."""

    # Precision, memory and engine
    bf16: bool | Literal["auto"] = "auto"
    """Compute in bfloat16, master weights in float32. auto: where the GPU can."""
    tf32: bool = False
    """Let float32 matrix products use TensorFloat-32 on GPUs that have it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more compute."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What ranks share: nothing (DDP), optimizer state, also gradients, also parameters."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses; needs `zero_stage` 2 or
    3."""
    deepspeed: str | None = None
    """DeepSpeed JSON file; trains with DeepSpeed and the file's stage instead of `zero_stage`."""
    ddp_timeout: float = 1800.0
    """Seconds that a rank waits for the others before it ends with an error."""

    # Loader
    num_workers: int = 1
    """Background threads that collate batches. 0: the training thread does."""

    # Run and output
    seed: int = 42
    """Seed of new weights, the order of rows and prompts, the validation split, dropout and sampling."""
    output_dir: str
    """Folder of checkpoints, metrics and the picture of the run."""
    save_total_limit: int = 2
    """Newest checkpoints that are kept."""
    resume_from_checkpoint: str | None = None
    """Checkpoint folder to go on from, or "last" for the newest in `output_dir`."""

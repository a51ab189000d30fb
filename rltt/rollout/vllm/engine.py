"""A vLLM engine inside the training process, over TRL's own plumbing.

TRL gathers weights (DDP, ZeRO-3) and cuts batches; what is decided here is that the engine is the policy as it is in
memory. It starts from the model's configuration with random weights and gets every weight from the trainer before its
first token: no checkpoint on disk can be stale, and converted or warm-started policies need none. Dtype, depth, stop
tokens, temperature and length come from the trainer.
"""

import gc
import os
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from ...errors import PolicyError
from ...models.adapters import merged_parameters, without_wrapper
from .cpu import prepare_environment


class Engine(VLLMGeneration):
    """TRL's plumbing around a vLLM engine: what every engine of a looped policy is told.

    Args:
        dtype: what the training path computes in.
        stop_token_ids: what ends a completion. The engine has no tokenizer of its own (tokens in, tokens out) and would
            know no end of text: the tokens that stop the training path's `generate` stop it too.
        generation_kwargs: further sampling parameters.
        options: those of TRL's `VLLMGeneration`.

    Attributes:
        prompts_of_last_rollout: token ids as the engine reports them.
    """

    def __init__(
        self, *, dtype: torch.dtype, stop_token_ids: list[int], generation_kwargs: dict[str, Any], **options: Any
    ) -> None:
        self.compute_dtype = dtype
        self.prompts_of_last_rollout: list[list[int]] = []
        sampling = {"stop_token_ids": stop_token_ids, "ignore_eos": True, **generation_kwargs}
        super().__init__(generation_kwargs=sampling, **options)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        if without_wrapper(self.model) is self.model:
            yield from super()._iter_named_params()
        else:
            yield from merged_parameters(self.model, self._dist.gather_params)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; the prompts are kept."""
        result = super().generate(*args, **kwargs)
        self.prompts_of_last_rollout = [list(ids) for ids in result[0]]
        return result

    def restart(self) -> None:
        """Start the engine anew, without weights. Engines of several processes cannot be, one by one."""
        self._init_vllm()


class ColocatedEngine(Engine):
    """vLLM inside the training process, which shares its device.

    Args:
        seed: of the engine's sampling.
        options: those of `Engine`.

    Raises:
        PolicyError: after a sync, a weight of the engine was never sent.
    """

    def __init__(self, *, seed: int, **options: Any) -> None:
        self.seed = seed
        super().__init__(mode="colocate", generation_kwargs={"detokenize": False}, **options)

    def _init_vllm(self) -> None:
        prepare_environment()
        accelerator = self.accelerator
        # As TRL does: the engine joins the trainer's processes in place of starting its own.
        os.environ["RANK"] = str(accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(accelerator.num_processes)
        ensure_master_addr_port()
        if self.tensor_parallel_size > 1:
            size, count = self.tensor_parallel_size, accelerator.num_processes
            ranks = [list(range(start, start + size)) for start in range(0, count, size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(ranks)
        from vllm import LLM

        policy = without_wrapper(accelerator.unwrap_model(self.model))
        config = deepcopy(policy.config)
        config.architectures = [type(policy).__name__]
        with tempfile.TemporaryDirectory(prefix="rltt-engine-") as folder:
            config.save_pretrained(folder)
            self.llm = LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,  # tokens in, tokens out: no second tokenizer
                dtype=self.compute_dtype,
                seed=self.seed + accelerator.process_index // self.tensor_parallel_size,
                tensor_parallel_size=self.tensor_parallel_size,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=self.gpu_memory_utilization,
                max_model_len=self.max_model_length,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=4096,
                logprobs_mode="processed_logprobs",  # those of the distribution that tokens are drawn from
            )
        self._llm_weights_sleeping = False
        accelerator.wait_for_everyone()

    def restart(self) -> None:
        """As in `Engine`; the memory of the old engine is freed first."""
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        super().restart()

    @property
    def engine_model(self) -> Any:
        """The engine's own model."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner.model

    @property
    def dtype(self) -> torch.dtype:
        """What the engine's weights are held in."""
        return self.engine_model.lm_head.weight.dtype

    def stale_weights(self) -> list[str]:
        """Names of the policy's weights of which the engine holds other values.

        With tensor parallelism each process holds a part of most weights; only whole ones are compared.
        """
        own = dict(self.engine_model.named_parameters())
        modules = dict(self.engine_model.named_modules())
        packed = {
            part: (name, index)
            for name, parts in self.engine_model.packed_modules_mapping.items()
            for index, part in enumerate(parts)
        }

        def held(name: str) -> torch.Tensor | None:
            path, _, kind = name.rpartition(".")
            block, _, last = path.rpartition(".")
            if last not in packed:
                return own.get(name)
            whole, index = packed[last]
            module = modules[f"{block}.{whole}"]
            return getattr(module, kind).split(module.output_sizes)[index]

        stale = []
        for name, weight in self._iter_named_params():
            mine = None if name.startswith("credit.") else held(name)
            if mine is None or (self.tensor_parallel_size > 1 and mine.shape != weight.shape):
                continue
            mine = mine[: len(weight)] if weight.dim() else mine  # vLLM pads vocabularies
            if not torch.equal(mine, weight.to(mine)):
                stale.append(name)
        return stale

    def sync_weights(self) -> None:
        """Send every weight, one tensor at a time, and drop what the engine has cached of the old ones."""
        model = self.engine_model
        loaded: set[str] = set()
        for name, weight in self._iter_named_params():
            loaded |= model.load_weights([(name, weight)])
        if missing := sorted({name for name, _ in model.named_parameters()} - loaded):
            raise PolicyError(
                f"the vLLM engine got no value for {', '.join(missing)}: it would sample from other weights"
            )
        self.llm.reset_prefix_cache()

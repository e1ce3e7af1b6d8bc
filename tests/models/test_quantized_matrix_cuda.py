"""The engine on a GPU with quantized checkpoints, against Transformers. Run with ``pytest -m gpu``."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_quantized_matrix import GPTQ, Format, awq, compressed, float8, gptq, per_channel, save

from shotcast.engine.llm import LLM
from shotcast.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.1}
FORMATS = {
    "fp8-channel": Format(per_channel, compressed("channel")),
    "fp8-blocks": Format(
        lambda weight: float8(weight, (128, 128), (), "weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": Format(gptq, {**GPTQ, "desc_act": False, "checkpoint_format": "gptq"}),
    "gptq-ordered": Format(lambda weight: gptq(weight, shuffled=True), {**GPTQ, "desc_act": True}),
}
LENGTHS = (1, 3, 40, 90, 17)
TOKENS = 24


@torch.inference_mode()
def logprobs_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return the log-probability of each token after the first."""
    known = torch.tensor(tokens, device="cuda")
    rows = model(known[None, :-1]).logits[0].float().log_softmax(1)
    return rows.gather(1, known[1:, None])[:, 0].cpu()


def quantize_activations(model: torch.nn.Module) -> None:
    """Round the inputs of the layers' matrices to FP8, each row by its own scale, as the engine does with FP8 rows."""

    def rounded(_: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = given[0].float()
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
        return (((x / scale).to(torch.float8_e4m3fn).float() * scale).to(given[0].dtype),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("together", [1, 5])
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, form: str, together: int) -> None:
    """Check prompts and sampled tokens, whose errors are to be those of plain PyTorch in bfloat16."""
    model, _ = save(tmp_path, FORMATS[form], sizes=SIZES)
    exact = copy.deepcopy(model).cuda()
    rounded = copy.deepcopy(model).bfloat16().cuda()
    if form == "fp8-channel":
        quantize_activations(rounded)
    numbers = torch.Generator().manual_seed(3)
    prompts = [torch.randint(512, (length,), generator=numbers).tolist() for length in LENGTHS]
    sampled = SamplingParams(max_tokens=TOKENS, seed=1, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    with LLM(str(tmp_path), device="cuda", dtype="bfloat16", max_model_len=128, max_num_seqs=together) as llm:
        outputs = llm.generate(prompts, sampled)
    errors: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.tokens]
        assert len(output.tokens) == TOKENS
        entries = [*(output.prompt_logprobs or ())[1:], *(output.logprobs or ())]
        found = torch.tensor([entry.logprob for entry in entries if entry])
        wanted = logprobs_of(exact, tokens)
        errors["ours"].append((found - wanted).abs())
        errors["theirs"].append((logprobs_of(rounded, tokens) - wanted).abs())
    ours, theirs = (torch.cat(each) for each in errors.values())
    assert ours.mean() <= 1.3 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()

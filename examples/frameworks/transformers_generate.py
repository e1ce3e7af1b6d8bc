"""Generate tokens by Transformers, with the model divided between ranks by its own plan.

    torchrun --nproc-per-node 2 examples/frameworks/transformers_generate.py --backend shotcast
    torchrun --nproc-per-node 2 examples/frameworks/transformers_generate.py --compile 1 --model FOLDER

Transformers keeps the process group that it finds. Without a model, a small one with random weights is made.
"""

import tempfile
import time

import torch
import torch.distributed as dist
from common import arguments, join, say
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PROMPT = [1, 17, 29, 5, 88, 64, 3, 42]


def random_model(hidden: int, layers: int) -> str:
    """Return a folder with a small Llama, the same for all ranks of this host."""
    folder = [None]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
        config = LlamaConfig(**sizes, vocab_size=128, num_attention_heads=8, num_key_value_heads=4, eos_token_id=None)
        folder = [tempfile.mkdtemp()]
        LlamaForCausalLM(config).save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return folder[0]


def main() -> None:
    options = arguments(__doc__, model="", hidden=64, layers=3, tokens=48, compile=0).parse_args()
    device = join(options)
    path = options.model or random_model(options.hidden, options.layers)
    model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32).eval()
    if options.compile:
        model.forward = torch.compile(model.forward, dynamic=True)
    prompt = torch.tensor([PROMPT], device=device)
    length = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
    tokens = model.generate(prompt, **length, pad_token_id=0)  # and once more, as the first time compiles
    start = time.perf_counter()
    again = model.generate(prompt, **length, pad_token_id=0)
    token_ms = 1e3 * (time.perf_counter() - start) / options.tokens
    say(tokens=tokens[0].tolist(), same=torch.equal(tokens, again), token_ms=token_ms)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

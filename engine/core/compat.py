"""Which of vLLM's plain mistakes are reproduced.

With `compat` None, the default everywhere, Pagewalk does what is right. With `compat` ``"0.27.0"`` it does exactly what that release does, also where
the release is plainly wrong; that is how its decisions are compared with recorded runs. The differences, all of them:

- a double free: refused here; there the count goes below 0 in silence (S25)
- a request that can never finish: refused at the door here; there it waits, or preempts itself, for ever
- a block that is registered for tokens which no step computes after all, because its request leaves the plan: taken out of the cache here, kept there
- LoRA adapters: known by name and id here; there by name alone, in the same namespace as the cache salt
- multimodal items in the block that a request's first outputs complete: all of them tell it apart here; there only the last item of the request
- an entry that ended inside a block and gave way to the full block's: gone for good here; there the next caching call registers it again
- BlockRemoved: here once the last block of a hash is gone; there for every physical block
- the event of an entry that ends inside a block: names the tokens from the block's start here, so that its parent was announced; there only the last
  hash unit, whose parent nobody may have heard of
- asynchronous steps and a state at the prompt's last hash boundary: registered once here; there again when the next step already overwrites that state
- chunks that begin inside a block: a hit that ends in the chunk before needs that chunk's blocks here; there it is taken without any of them
- two specs of full attention in one hybrid: the hits of both are cut to the common length here; there the second one's blocks beyond it are adopted too,
  and written over
- chunks with a draft head, windows or chunks under context parallelism: refused here when built; there every lookup fails
- recurrent groups that differ in mode or block size while chunks are cut for one of them: refused here; there states are offered that no step ends at
- sink attention: works here; there its manager cannot be built (R1.16)
- sliding-window or chunked groups beside Mamba states with finer hashes: hits of whole blocks here; there every lookup fails (R6.2)
"""

from __future__ import annotations

from engine.errors import InvalidInput

VLLM_0_27_0 = "0.27.0"


def check_compat(compat: str | None) -> str | None:
    """`compat` itself. Raises InvalidInput for a release that is not reproduced."""
    if compat not in (None, VLLM_0_27_0):
        raise InvalidInput(f"compat is {compat!r}, but only the mistakes of vLLM {VLLM_0_27_0} are reproduced: give {VLLM_0_27_0!r}, or leave it out")
    return compat

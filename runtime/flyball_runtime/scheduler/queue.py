"""Sequences that wait for admission: clients take turns by the service they had, each client's own keep policy order.

After the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Service is tokens,
weighted: a prompt's when it is admitted, output as it comes. The waiting client with the least service is next. A client
that starts to wait is lifted to the least service among those that wait already, so that idling saves up nothing.

The paper's clients are fixed; ours choose their names. Under the lift alone, ever new names would all start before an old
client that owes something, and keep it waiting. So a virtual time advances with each admission, and lifts too.

Within a level there are two lanes. What can no longer meet its deadline is moved to the late one, oldest first, and what
can goes before it. But of the prompt tokens admitted while late ones wait, they get a share, so that all of them finish.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TypeVar

from flyball_runtime.core.request import Sequence
from flyball_runtime.scheduler.policies import Key, Policy

T = TypeVar("T")
Rank = tuple[Key, float, Key]
"""Of an account in a lane: level, service, first sequence."""


INPUT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
"""What a token costs its client, as in the paper: output tokens are computed one at a time, and cost more."""

MAX_IDLE_CLIENTS = 256
"""How many clients without a request are remembered per level. The longest idle is forgotten first, with what it owes."""


LATE_SHARE = 0.1
"""Of the prompt tokens admitted in a level, what late sequences get while they and others wait."""

IN_TIME, LATE = 0, 1
"""The lanes."""


class Account:
    """One client in one level: its sequences and the service it had.

    Attributes:
        service: weighted tokens. Output of running sequences is added when it matters.
        waiting: by lane, with their place in it, sorted.
        running: by request id.
        ranks: its place among the accounts with sequences in a lane; None without one.
    """

    __slots__ = ("client", "level", "ranks", "running", "service", "waiting")

    def __init__(self, client: str, level: "Level", service: float) -> None:
        self.client = client
        self.level = level
        self.service = service
        self.waiting: tuple[list[tuple[Key, Sequence]], ...] = ([], [])
        self.running: dict[str, Sequence] = {}
        self.ranks: list[Rank | None] = [None, None]

    def settle(self) -> None:
        """Charge what running sequences have put out by now."""
        for seq in self.running.values():
            self.charge_output(seq)

    def charge_output(self, seq: Sequence) -> None:
        self.service += OUTPUT_TOKEN_WEIGHT * (len(seq.token_ids) - seq.num_charged_tokens)
        seq.num_charged_tokens = len(seq.token_ids)


class Level:
    """The accounts that the policy treats alike: those of one priority, or all.

    Attributes:
        accounts: clients with a sequence that waits or runs.
        idle: service of clients without one, the longest idle first.
        virtual_time: the least service of a client that starts to wait.
        late_credit: tokens that late sequences may take before those in time; below 0 they took more.
    """

    __slots__ = ("accounts", "idle", "key", "late_credit", "num_waiting_accounts", "virtual_time")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.accounts: dict[str, Account] = {}
        self.idle: OrderedDict[str, float] = OrderedDict()
        self.num_waiting_accounts = 0
        self.virtual_time = 0.0
        self.late_credit = 0.0

    def open(self, client: str) -> Account:
        """Return the account of a client, with what it owes if it had been idle."""
        if (account := self.accounts.get(client)) is None:
            account = self.accounts[client] = Account(client, self, self.idle.pop(client, 0.0))
        return account

    def close(self, account: Account) -> None:
        """Remember the service of a client whose last sequence has ended."""
        del self.accounts[account.client]
        self.idle[account.client] = account.service
        if len(self.idle) > MAX_IDLE_CLIENTS:
            self.idle.popitem(last=False)


class WaitingQueue:
    """For each lane, accounts in a sorted list, and each account's sequences in another.

    Servers bound their queue, so shifting a list's pointers is cheaper than a heap that must forget aborts. With one client,
    or without ``fair_share``, the order is the policy's.
    """

    def __init__(self, policy: Policy, fair_share: bool = True) -> None:
        self._policy = policy
        self._fair_share = fair_share
        self._levels: dict[Key, Level] = {}  # those with an account
        self._orders: tuple[list[tuple[Rank, Account]], ...] = ([], [])  # by lane, by rank
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def head(self) -> Sequence:
        lane = self._next_lane()
        return self._orders[lane][0][1].waiting[lane][0][1]

    def push(self, seq: Sequence) -> None:
        if not seq.rank:
            seq.level, seq.rank = self._policy(seq)
        if (level := self._levels.get(seq.level)) is None:
            level = self._levels[seq.level] = Level(seq.level)
        account = level.open(self._client(seq))
        if not any(account.waiting):
            self._lift(account)
        self._insert(account, seq)

    def admit_head(self, num_cached_tokens: int) -> Sequence:
        """Take the head out and charge its client for the prompt tokens to compute; those of a recompute are free."""
        lane = self._next_lane()
        account = self._orders[lane][0][1]
        seq = account.waiting[lane].pop(0)[1]
        self._num_waiting -= 1
        level, num_tokens, num_charged = account.level, len(seq.token_ids) - num_cached_tokens, 0
        if self._orders[1 - lane]:
            self._credit(level, lane, num_tokens)
        account.running[seq.request_id] = seq
        if seq.num_preemptions == 0:
            num_charged = INPUT_TOKEN_WEIGHT * num_tokens
            seq.num_charged_tokens = seq.num_prompt_tokens
        level.virtual_time = max(level.virtual_time, account.service) + num_charged / level.num_waiting_accounts
        account.service += num_charged
        self._place(account)
        return seq

    def join(self, seq: Sequence) -> None:
        """Note that a sequence runs for a request that was admitted before. Its client pays for tokens from its last on."""
        seq.num_charged_tokens = len(seq.token_ids) - 1
        self._account(seq).running[seq.request_id] = seq

    def demote_head(self) -> None:
        """Move the head to the late lane, where it stays until it has ended."""
        seq = self.head()
        account = self._account(seq)
        self._take_out(account, seq)
        seq.is_late = True
        self._insert(account, seq)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        account = self._account(seq)
        self._take_out(account, seq)
        self._place(account)
        self._close_if_idle(account)

    def release(self, seq: Sequence) -> None:
        """Note that an admitted sequence has stopped running. One that is preempted is pushed before."""
        account = self._account(seq)
        account.charge_output(seq)
        del account.running[seq.request_id]
        self._place(account)
        self._close_if_idle(account)

    def settle(self) -> None:
        """Charge the output of running sequences, if it can decide who is next. Call it before a step's admissions."""
        if sum(map(len, self._orders)) > 1:
            self._settle_waiting()

    def _client(self, seq: Sequence) -> str:
        return seq.client if self._fair_share else ""

    def _account(self, seq: Sequence) -> Account:
        return self._levels[seq.level].accounts[self._client(seq)]

    def _next_lane(self) -> int:
        in_time, late = self._orders
        if not in_time or not late:
            return LATE if late else IN_TIME
        first, other = in_time[0][1].level, late[0][1].level
        if first is not other:
            return IN_TIME if first.key < other.key else LATE
        return LATE if first.late_credit >= len(late[0][1].waiting[LATE][0][1].token_ids) else IN_TIME

    def _credit(self, level: Level, lane: int, num_tokens: int) -> None:
        """Note what a lane takes of its level's prompt tokens, if sequences of the other lane wait there too."""
        if self._first(level, 1 - lane):
            level.late_credit += -num_tokens if lane == LATE else num_tokens * LATE_SHARE / (1 - LATE_SHARE)

    def _first(self, level: Level, lane: int) -> Account | None:
        """Return the account of a level that is first in a lane."""
        order = self._orders[lane]
        index = bisect_left(order, level.key, key=lambda entry: entry[0][0])
        return order[index][1] if index < len(order) and order[index][1].level is level else None

    def _insert(self, account: Account, seq: Sequence) -> None:
        insort(account.waiting[seq.is_late], (_place_in_lane(seq), seq), key=_key)
        self._num_waiting += 1
        self._place(account)

    def _take_out(self, account: Account, seq: Sequence) -> None:
        waiting = account.waiting[seq.is_late]
        index = bisect_left(waiting, _place_in_lane(seq), key=_key)
        assert waiting[index][1] is seq, f"{seq!r} is not where its key says"
        del waiting[index]
        self._num_waiting -= 1

    def _settle_waiting(self) -> None:
        waiting = {account: None for order in self._orders for _, account in order if account.running}
        for account in waiting:
            account.settle()
            self._place(account)

    def _lift(self, account: Account) -> None:
        """Take the credit away that a client has over those that wait already."""
        self._settle_waiting()
        level = account.level
        waiting = [first for lane in (IN_TIME, LATE) if (first := self._first(level, lane))]
        least = max(level.virtual_time, min((first.service for first in waiting), default=0.0))
        if account.service < least:
            account.settle()
            account.service = max(account.service, least)

    def _place(self, account: Account) -> None:
        """Move the account to where its service and its first sequences say."""
        did_wait = any(account.ranks)
        for lane in (IN_TIME, LATE):
            order, waiting, old = self._orders[lane], account.waiting[lane], account.ranks[lane]
            rank = (account.level.key, account.service, waiting[0][0]) if waiting else None
            if rank == old:
                continue
            if old is not None:
                del order[bisect_left(order, old, key=_key)]
            if rank is not None:
                insort(order, (rank, account), key=_key)
            account.ranks[lane] = rank
        account.level.num_waiting_accounts += any(account.ranks) - did_wait

    def _close_if_idle(self, account: Account) -> None:
        if any(account.waiting) or account.running:
            return
        account.level.close(account)
        if not account.level.accounts:  # nobody competes there any more: no debt matters
            del self._levels[account.level.key]


def _place_in_lane(seq: Sequence) -> Key:
    return (seq.arrival_index,) if seq.is_late else seq.rank


def _key(entry: tuple[T, object]) -> T:
    return entry[0]

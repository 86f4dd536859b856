"""In which order sequences run, and who waits for it.

A policy is a pure function from a sequence to a sort key, whose last part is the arrival: of each client the queue admits
the smallest key first, and preemption takes the largest key among the running, whoever's it is. Keys must be unique and
must not change. Some running sequence has the smallest key; it is never preempted, so it finishes, and preemption cannot
go in circles. A preempted sequence keeps its key, and with it the place before its client's later ones.

Between clients the queue decides, within what precedes the arrival in the key: a fair share never outweighs a priority.
Clients take turns by the service they had. After the Virtual Token Counter (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024): service is tokens, weighted: a prompt's when it is admitted, output as it comes. The waiting
client with the least service is next. A client that starts to wait is lifted to the least service among those that wait
already, so that idling saves up nothing.

The paper's clients are fixed; ours choose their names. Under the lift alone, ever new names would all start before an old
client that owes something, and keep it waiting. So a virtual time advances with each admission, and lifts too.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable

from flyball_runtime.core.request import Sequence

Key = tuple[float, ...]
Policy = Callable[[Sequence], Key]


def fcfs(seq: Sequence) -> Key:
    """First come, first served."""
    return (seq.arrival_index,)


def priority(seq: Sequence) -> Key:
    """Lower ``Request.priority`` first; first come, first served among equals. Low priorities can starve: they asked to."""
    return (seq.priority, seq.arrival_index)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def choose_victim(running: Iterable[Sequence], policy: Policy) -> Sequence:
    """Return the sequence to preempt: the one that the policy would run last.

    Under both policies here that is the latest arrival (of the lowest priority), which has computed least and so loses
    least in most mixes.
    """
    return max(running, key=policy)


INPUT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
"""What a token costs its client, as in the paper: output tokens are computed one at a time, and cost more."""

MAX_IDLE_CLIENTS = 256
"""How many clients without a request are remembered per level. The longest idle is forgotten first, with what it owes."""


class Account:
    """One client in one level: its sequences and the service it had.

    Attributes:
        service: weighted tokens. Output of running sequences is added when it matters.
        waiting: by policy key, sorted.
        running: by request id.
        rank: its place among the accounts with waiting sequences; None without one.
    """

    __slots__ = ("client", "level", "rank", "running", "service", "waiting")

    def __init__(self, client: str, level: "Level", service: float) -> None:
        self.client = client
        self.level = level
        self.service = service
        self.waiting: list[tuple[Key, Sequence]] = []
        self.running: dict[str, Sequence] = {}
        self.rank: Key | None = None

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
    """

    __slots__ = ("accounts", "idle", "key", "num_waiting_accounts", "virtual_time")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.accounts: dict[str, Account] = {}
        self.idle: OrderedDict[str, float] = OrderedDict()
        self.num_waiting_accounts = 0
        self.virtual_time = 0.0

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
    """Accounts in a sorted list, and each account's sequences in another.

    Servers bound their queue, so shifting a list's pointers is cheaper than a heap that must forget aborts. With one client,
    or without ``fair_share``, the order is the policy's.
    """

    def __init__(self, policy: Policy, fair_share: bool = True) -> None:
        self._policy = policy
        self._fair_share = fair_share
        self._levels: dict[Key, Level] = {}  # those with an account
        self._order: list[tuple[Key, Account]] = []  # accounts with waiting sequences, by rank
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def head(self) -> Sequence:
        return self._order[0][1].waiting[0][1]

    def push(self, seq: Sequence) -> None:
        key = self._policy(seq)
        level_key = key[:-1]
        if (level := self._levels.get(level_key)) is None:
            level = self._levels[level_key] = Level(level_key)
        account = level.open(self._client(seq))
        if not account.waiting:
            self._lift(account)
        insort(account.waiting, (key, seq), key=_key)
        self._num_waiting += 1
        self._place(account)

    def admit_head(self, num_cached_tokens: int) -> Sequence:
        """Take the head out and charge its client for the prompt tokens to compute; those of a recompute are free."""
        account = self._order[0][1]
        seq = account.waiting.pop(0)[1]
        self._num_waiting -= 1
        account.running[seq.request_id] = seq
        level, num_tokens = account.level, 0
        if seq.num_preemptions == 0:
            num_tokens = INPUT_TOKEN_WEIGHT * (seq.num_prompt_tokens - num_cached_tokens)
            seq.num_charged_tokens = seq.num_prompt_tokens
        level.virtual_time = max(level.virtual_time, account.service) + num_tokens / level.num_waiting_accounts
        account.service += num_tokens
        self._place(account)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        account = self._account(seq)
        index = bisect_left(account.waiting, self._policy(seq), key=_key)
        assert account.waiting[index][1] is seq, f"{seq!r} is not where its key says"
        del account.waiting[index]
        self._num_waiting -= 1
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
        if len(self._order) > 1:
            self._settle_waiting()

    def _client(self, seq: Sequence) -> str:
        return seq.client if self._fair_share else ""

    def _account(self, seq: Sequence) -> Account:
        return self._levels[self._policy(seq)[:-1]].accounts[self._client(seq)]

    def _settle_waiting(self) -> None:
        for account in [account for _, account in self._order if account.running]:
            account.settle()
            self._place(account)

    def _lift(self, account: Account) -> None:
        """Take the credit away that a client has over those that wait already."""
        self._settle_waiting()
        level = account.level
        least = level.virtual_time
        if level.num_waiting_accounts:
            first = self._order[bisect_left(self._order, level.key, key=_key)][1]
            least = max(least, first.service)
        if account.service < least:
            account.settle()
            account.service = max(account.service, least)

    def _place(self, account: Account) -> None:
        """Move the account to where its service and its first sequence say."""
        rank = (*account.level.key, account.service, account.waiting[0][0][-1]) if account.waiting else None
        if rank == account.rank:
            return
        if account.rank is not None:
            del self._order[bisect_left(self._order, account.rank, key=_key)]
            account.level.num_waiting_accounts -= 1
        if rank is not None:
            insort(self._order, (rank, account), key=_key)
            account.level.num_waiting_accounts += 1
        account.rank = rank

    def _close_if_idle(self, account: Account) -> None:
        if account.waiting or account.running:
            return
        account.level.close(account)
        if not account.level.accounts:  # nobody competes there any more: no debt matters
            del self._levels[account.level.key]


def _key(entry: tuple[Key, object]) -> Key:
    return entry[0]

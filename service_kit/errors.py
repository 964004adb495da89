"""What can go wrong, named by who must act. Knows nothing of gRPC or HTTP: edges own a table.

`str(error)` is always a sentence for its reader; the attributes are for programs. `told` is what
may leave the system: where its parts are is its operator's business.
"""

from collections.abc import Sequence


class KaitenError(Exception):
    """Root of the taxonomy. Never raised itself."""

    @property
    def told(self) -> str:
        """The sentence for clients, and for whoever needs no key."""
        return str(self)


class InvalidRequest(KaitenError):
    """The client must change its request; sending it again can never succeed."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}" if field else rule)
        self.field = field
        self.rule = rule

    @property
    def violations(self) -> "tuple[InvalidRequest, ...]":
        """Everything that is wrong, one field each. `field` and `rule` are the first one's."""
        return (self,)


class SeveralInvalid(InvalidRequest):
    """More than one field is wrong."""

    def __init__(self, violations: Sequence[InvalidRequest]) -> None:
        first = violations[0]
        super().__init__(first.field, first.rule)
        self.args = ("; ".join(map(str, violations)),)
        self._violations = tuple(violations)

    @property
    def violations(self) -> tuple[InvalidRequest, ...]:
        return self._violations


class TooLong(InvalidRequest):
    """More tokens, bytes or items than this deployment will ever take."""

    def __init__(self, field: str, limit: int, got: int) -> None:
        super().__init__(field, f"must be at most {limit}, got {got}")
        self.limit = limit
        self.got = got


class NotFound(KaitenError):
    """`what` does not exist, or no longer; `why` says for how long such things are kept."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what} not found" + (f": {why}" if why else ""))
        self.what = what
        self.why = why


class AlreadyExists(KaitenError):
    """`what` exists with another content: the client reused a name."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} already exists with another content")
        self.what = what


class Overloaded(KaitenError):
    """Refused before any work was done; the same request may succeed after `retry_after_s`.

    `subject` is whose bound it was: "cell", "gateway" or "tenant", and then `tenant` names it;
    `rule` is the setting that holds the limit. `live` is what counted then.
    """

    def __init__(
        self,
        reason: str,
        retry_after_s: float,
        limit: int | None = None,
        *,
        live: int | None = None,
        subject: str = "cell",
        rule: str = "",
        tenant: str = "",
    ) -> None:
        known = (("live", live), (rule or "limit", limit))
        bounds = ", ".join(f"{name} {value}" for name, value in known if value is not None)
        bound = f" ({bounds})" if bounds else ""
        super().__init__(f"overloaded: {reason}{bound}; retry in {retry_after_s:g} s")
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.limit = limit
        self.live = live
        self.subject = subject
        self.rule = rule
        self.tenant = tenant


class DeadlineExceeded(KaitenError):
    """The request's time ran out, or is known not to suffice; `phase` says where, e.g. "queued" or
    "decode".
    """

    def __init__(self, phase: str, reason: str = "") -> None:
        super().__init__(
            f"deadline exceeded in phase {phase!r}" + (f": {reason}" if reason else "")
        )
        self.phase = phase


class Cancelled(KaitenError):
    """Somebody asked for the end. Nobody must act."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class Unavailable(KaitenError):
    """A part this answer depends on is away; nothing was lost, try again. `told`: in place of a
    reason that names addresses or users.
    """

    def __init__(self, reason: str, retry_after_s: float = 1.0, *, told: str = "") -> None:
        super().__init__(f"unavailable: {reason}")
        self.reason = reason
        self.retry_after_s = retry_after_s
        self._told = told or reason

    @property
    def told(self) -> str:
        return f"unavailable: {self._told}"


class Unserved(Unavailable):
    """It was accepted, and no worker came that can do it. It has ended: what is sent again is
    another request, with another id.
    """


class OutOfOrder(KaitenError):
    """The caller's picture of the receiver is stale: resync, or stop leading."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StaleLeader(OutOfOrder):
    """A newer leader was seen, of this epoch: stand for election again, above it."""

    def __init__(self, reason: str, epoch: int) -> None:
        super().__init__(reason)
        self.epoch = epoch


class NotLeader(KaitenError):
    """This scheduler is a standby; `leader_address` (may be empty) is the one to ask."""

    def __init__(self, leader_address: str) -> None:
        elsewhere = (
            f"; the leader is {leader_address}" if leader_address else "; no leader is known"
        )
        super().__init__(f"not the leader{elsewhere}")
        self.leader_address = leader_address


class DataLoss(KaitenError):
    """What the caller holds and what we hold are not the same output: it cannot be continued."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Failed(KaitenError):
    """The system could not compute a choice; the sentence is the worker's."""


class Unsatisfiable(KaitenError):
    """A choice had no token to go on with, by what its request asks; the reason is the worker's."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the output cannot go on as it was asked for: {reason}")


class Unauthenticated(KaitenError):
    """The caller did not prove who it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Forbidden(KaitenError):
    """The caller is known, and may not do this."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(KaitenError):
    """The operator must change a setting; `text` says which, why and to what."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

"""What servers refuse, in our words: whether to try again, and what to say if that was in vain."""

import ssl
from collections.abc import Sequence
from typing import Any, Final

from redis import exceptions as redis_errors

from service_kit.errors import Unavailable

# Refusals of a server that is well but not ready: by the first word of the error.
TRANSIENT: Final = frozenset(
    {
        "LOADING",
        "BUSY",
        "MISCONF",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "READONLY",
        "NOREPLICAS",
        # Of a server that is not, or no more, the one for these keys.
        "MOVED",
        "ASK",
        "UNBLOCKED",
    }
)
# Of a script that met a key on its way to another server. It was refused before it wrote: those
# that write name all keys that may be there.
ON_THE_WAY: Final = ("undeclared keys were accessed", "access a non local key")
# Of WAIT and WAITAOF: it has become a replica since it took what they are to wait for, which may be
# lost with that. What is sent again goes to the next primary.
NO_MORE_PRIMARY: Final = "cannot be used with replica instances"
# Of a command in a script; a user that may not even call the script has NOPERM.
NOT_PERMITTED: Final = "ACL failure in script"
REFUSALS: Final = {
    "OOM": "the ledger's store is out of memory",
    "NOPERM": "the ledger's user lacks a permission",
}


class NotLetIn(Unavailable):
    """The store does not know the url's user or password, or no more. A start is refused for it
    (see `Ledger.check`); a service that runs waits until it is mended.
    """


class NotPrimary(redis_errors.ReadOnlyError):
    """Somebody else is, or will be."""


def translated(error: Exception) -> Exception:
    """Unavailable with the reason; a refusal that means our mistake as it is."""
    if isinstance(error, redis_errors.AuthenticationError):
        return NotLetIn(
            "ledger: the store must accept the url's user and password; it said:"
            f" {str(error).rstrip('.')}. Fix: put them into the ledger url,"
            " redis://user:password@host:port"
        )
    if isinstance(error, redis_errors.ResponseError):
        reason = REFUSALS.get(_code(error))
        if reason is None and not is_transient(error):
            return error
        told = reason or "the ledger is not ready"
        return Unavailable(f"{told}: {error}", told=told)
    if isinstance(refused := error.__context__, ssl.SSLCertVerificationError):
        return Unavailable(
            f"the ledger cannot be reached: its certificate is refused: {refused.verify_message}."
            " Fix: name the file of its authority in the ledger url, rediss://…?ssl_ca_certs=FILE,"
            " and dial a name that is in the certificate"
        )
    told = "the ledger cannot be reached"
    return Unavailable(f"{told}: {str(error) or 'no answer in time'}", told=told)


def is_transient(error: BaseException) -> bool:
    """Whether the same command may be accepted a moment later."""
    if isinstance(error, redis_errors.ResponseError):
        words = (*ON_THE_WAY, NO_MORE_PRIMARY)
        return _code(error) in TRANSIENT or any(each in str(error) for each in words)
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return False
    return not isinstance(error, redis_errors.AuthenticationError)


def is_refusal(error: BaseException) -> bool:
    """A server's final word, as it came or translated."""
    cause = error.__cause__ or error
    return isinstance(cause, redis_errors.ResponseError) and not is_transient(cause)


def raise_refusal(replies: Sequence[Any]) -> None:
    """The first of them. NOSCRIPT is none: it is what a restarted server says."""
    for reply in replies:
        if isinstance(reply, redis_errors.RedisError) and not isinstance(
            reply, redis_errors.NoScriptError
        ):
            raise reply


def _code(error: redis_errors.ResponseError) -> str:
    """First word of a server's refusal, also when redis-py has made a class of it and cut the word
    off.
    """
    if NOT_PERMITTED in str(error):
        return "NOPERM"
    known = {
        redis_errors.OutOfMemoryError: "OOM",
        redis_errors.ReadOnlyError: "READONLY",
        NotPrimary: "READONLY",
        redis_errors.NoPermissionError: "NOPERM",
        redis_errors.MasterDownError: "MASTERDOWN",
        redis_errors.ClusterDownError: "CLUSTERDOWN",
        redis_errors.TryAgainError: "TRYAGAIN",
        redis_errors.MovedError: "MOVED",
        redis_errors.AskError: "ASK",
    }
    return known.get(type(error)) or str(error).split(" ", 1)[0].lstrip("-")

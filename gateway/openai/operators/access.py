"""Who may use what is for operators, over HTTP."""

from gateway.http.errors import HttpError
from gateway.http.exchange import HttpExchange
from service_kit.errors import Forbidden


def check_operator(exchange: HttpExchange) -> None:
    """Forbidden says what it takes. Pages of other sites can make a browser ask without reading:
    each would hold a stream.
    """
    if not exchange.tenant.is_operator:
        fix = "one of `kaiten keygen NAME --role operator`, or without keys a loopback --http-host"
        raise Forbidden(f"this is for operators: it takes a key, {fix}")
    site = exchange.header("sec-fetch-site")
    if site in ("cross-site", "same-site") and not exchange.header("origin"):
        rule = "other sites' pages must be named in --cors-origins"
        raise HttpError(403, f"Sec-Fetch-Site: {rule}, got {site}", "origin_not_allowed")

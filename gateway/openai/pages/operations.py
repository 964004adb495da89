"""Pages for people: `/` to try the model, `/docs` to read the API. All of each is in one file."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

from gateway.http.exchange import Exchange
from gateway.openai.operation import OPEN, Api, Operation

HTML: Final = "text/html; charset=utf-8"


class Page:
    """One file, and headers by which its own code runs and nothing else does, whatever is in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.raw = Path(__file__).with_name(name).read_bytes()
        policy = (
            f"default-src 'none'; script-src {self._hashes('script')}; "
            f"style-src {self._hashes('style')}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.headers = {
            "content-security-policy": policy,
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    def _hashes(self, tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), self.raw, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(each).digest()).decode()}'" for each in found)

    async def __call__(self, _api: Api, exchange: Exchange, _body: None) -> None:
        await exchange.send(200, self.raw, HTML, self.headers)


OPERATIONS: Final = (
    Operation("GET", "/", "tryIt", Page("try.html"), OPEN, ("text/html",)),
    Operation("GET", "/docs", "docs", Page("docs.html"), OPEN, ("text/html",)),
)

"""Pages for people: `/` to try the model, `/docs` to read the API, `/dashboard` to see the batch.

All of each is in one answer.
"""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import OPEN, Api, Operation

HTML: Final = "text/html; charset=utf-8"
PART: Final = re.compile(rb"\{(\w+\.(?:js|css))\}")


class Page:
    """One answer, and headers by which its own code runs and nothing else does, whatever is in it.

    `{NAME.js}` and `{NAME.css}` stand for files beside the page.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        path = Path(__file__).parent / name
        self.raw = PART.sub(
            lambda part: (path.parent / part[1].decode()).read_bytes(), path.read_bytes()
        )
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

    async def __call__(self, _api: Api, exchange: HttpExchange, _body: None) -> None:
        await exchange.send(200, self.raw, HTML, self.headers)


OPERATIONS: Final = (
    Operation("GET", "/", "tryIt", Page("try.html"), OPEN, ("text/html",)),
    Operation("GET", "/docs", "docs", Page("docs.html"), OPEN, ("text/html",)),
    Operation("GET", "/dashboard", "dashboard", Page("dashboard/page.html"), OPEN, ("text/html",)),
)

"""A vLLM server that writes shards (``dflash_kit.vllm_served``), as its client sees it."""

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_kit.errors import KitError
from dflash_kit.shard_share import Share
from dflash_kit.shards import ShardsHeader

# Longer than any answer or a backlog of states should take; a server that is gone is noticed at once.
TIMEOUT_S = 3600.0
# How long a file that the server has written may take to be seen here.
FOLDER_WAIT_S = 10.0
RESUME_HELP = "finished shards are intact: start it again, and run the same command to resume"
PRINT_HELP = "the same command with --print_serve_command prints how to start one"


class ServerRefusal(KitError):
    """The server does not do what it is asked for; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server that was found to have our connector.

    Raises:
        KitError: (by its methods) it does not answer, or answers with an error.
    """

    url: str
    header: ShardsHeader
    """Header of the shards that it writes."""
    folder: str
    """Shards folder, as its host sees it."""
    share: Share
    session: int | None = None
    """Ours, once it is opened."""

    @classmethod
    def connect(cls, url: str) -> "Server":
        """Look what the server writes; nothing is opened.

        Raises:
            KitError: no address, nobody answers, or a server without our connector.
        """
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise KitError(f"server is {url!r}; allowed: http://host:port, as in http://127.0.0.1:8000")
        try:
            found = call(url, "/v1/shards")
            header, share = ShardsHeader.from_dict(found["header"]), Share(found["rank"], found["world_size"])
            return cls(url=url, header=header, folder=found["folder"], share=share)
        except ServerRefusal as error:
            if error.status != 404:
                raise
            raise KitError(f"the server at {url} was started without our connector; {PRINT_HELP}") from error
        except (KeyError, TypeError) as error:
            raise KitError(f"the server at {url} answers in another form; {PRINT_HELP}") from error

    def require(self, header: ShardsHeader, share: Share) -> None:
        """Refuse a server that would write other shards.

        Raises:
            KitError: naming the first difference, and both values.
        """
        difference = self.header.difference(header)
        if difference is None and self.share != share:
            theirs, ours = (f"{each.rank} of {each.world_size}" for each in (self.share, share))
            difference = ("rank of world_size", theirs, ours)
        if difference is not None:
            name, theirs, ours = difference
            raise KitError(
                f"the server at {self.url} writes shards whose {name} is {theirs}, but here it is {ours}; give this command "
                f"the server's settings, or start another server ({PRINT_HELP})"
            )

    def open(self, folder: Path) -> tuple["Server", list[str]]:
        """Begin a session.

        Args:
            folder: the server's shards folder, as this host sees it.

        Returns:
            The server with its session, and notes on what was mended in the folder.

        Raises:
            KitError: the folder cannot be written, or is not the server's.
        """
        answer = call(self.url, "/v1/shards/open", {})
        if answer["error"] is not None:
            raise KitError(f"the server at {self.url}: {answer['error']}")
        opened = replace(self, session=answer["session"])
        deadline_s = time.monotonic() + FOLDER_WAIT_S
        while _sha256(folder / self.share.manifest_name, answer["manifest_bytes"]) != answer["manifest_sha256"]:
            if time.monotonic() > deadline_s:
                opened.finish(None)
                raise KitError(
                    f"the server at {self.url} writes into {self.folder} of its host, but {folder} here is another folder; "
                    "pass --out as the server's folder is seen from here"
                )
            time.sleep(0.2)
        return opened, answer["notes"]

    def status(self) -> dict[str, Any]:
        """Rows accepted since the last call (``accepted``: id and tokens), ``bytes`` in finished shards, and ``error``."""
        return call(self.url, "/v1/shards/status", {"session": self.session})

    def finish(self, summary: dict[str, Any] | None) -> dict[str, Any]:
        """Have the shards finished and the folder released; returns the last status."""
        return call(self.url, "/v1/shards/finish", {"session": self.session, "summary": summary})

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the target answer: OpenAI's completions API."""
        return call(self.url, "/v1/completions", request)


def call(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send JSON and return the JSON of the answer. ``VLLM_API_KEY`` of the environment is sent along; proxies are not used.

    Raises:
        ServerRefusal: it does not do what it is asked for.
        KitError: there is no answer, or the server has failed.
    """
    headers = {"Content-Type": "application/json"}
    if os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url + path, data=data, headers=headers)
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise KitError(f"the server at {url} has failed ({_reason(error)}); {RESUME_HELP}") from error
        raise ServerRefusal(f"the server at {url} refuses {path}: {_reason(error)}", error.code) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise KitError(
            f"the server at {url} does not answer ({reason or type(error).__name__}); {RESUME_HELP}"
        ) from error
    except ValueError as error:
        raise KitError(f"the server at {url} is no vLLM server: {path} is not answered in JSON ({error})") from error
    if not isinstance(found, dict):
        raise KitError(f"the server at {url} is no vLLM server: {path} is answered by {type(found).__name__}")
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says of its refusal."""
    try:
        text = error.read(65536).decode(errors="replace")
        found = json.loads(text)
        inner = found.get("error", found.get("detail", found))
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError, OSError):
        return f"status {error.code}"


def _sha256(path: Path, num_bytes: int) -> str | None:
    """Of the first bytes: rows of an earlier client may still be added."""
    try:
        return hashlib.sha256(path.read_bytes()[:num_bytes]).hexdigest()
    except FileNotFoundError:
        return None

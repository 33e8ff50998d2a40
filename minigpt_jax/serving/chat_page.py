"""The page at the server's address, and what a browser is to allow it. Framework-free.

The page is assets/chat_page.html: one file with its own style and script. The policy names the two by their hashes, so
that nothing else runs: neither another host's script nor one that a model wrote.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib import resources


def chat_page() -> tuple[str, str]:
    """The page as HTML, and the value of its Content-Security-Policy header."""
    html = resources.files("minigpt_jax.assets").joinpath("chat_page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_source(html, 'script')}; style-src {_source(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _source(html: str, element: str) -> str:
    """The hash by which a policy allows the text of the one <script> or <style>."""
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode('utf-8')).digest()).decode('ascii')}'"

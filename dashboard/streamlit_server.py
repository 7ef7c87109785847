"""Streamlit's own command, with two of its habits mended: `python -P -m dashboard.streamlit_server run app.py`.

Where a WebSocket names an origin that is not the page's, Streamlit asks a public service for this network's address, to
compare the two, and waits for the answer on its event loop: any web page could have it do so, again and again. The
other is in pending_downloads.py.
"""

from __future__ import annotations

from streamlit import net_util
from streamlit.web import cli

from dashboard.pending_downloads import keep_pending_downloads


def _not_asked() -> None:
    """No address, so that such an origin is refused at once. `server.corsAllowedOrigins` names others to be let in."""


def main() -> None:
    """Becomes the server, with the arguments of the process."""
    net_util.get_external_ip = _not_asked
    keep_pending_downloads()
    cli.main(prog_name="streamlit")


if __name__ == "__main__":
    main()

"""Draw the mermaid diagrams of the documentation that have no picture yet.

    python scripts/generate-docs-diagrams.py            # needs npm and chromium
    python scripts/generate-docs-diagrams.py --check    # only says what is missing or left over

Pictures go to docs/images/diagrams/, one for each diagram, named after its text.
"""

import argparse
import http.server
import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.docs_site.diagrams import FOLDER, diagrams_in  # noqa: E402

MERMAID = "mermaid@11.17.2"
PICTURES = ROOT / "docs" / FOLDER

PAGE = """<!doctype html><meta charset="utf-8">
<body><script src="/node_modules/mermaid/dist/mermaid.min.js"></script>
<script>
mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false,
  fontFamily: "sans-serif", deterministicIds: true});
(async () => {
  const pictures = {};
  for (const [name, text] of Object.entries(DIAGRAMS)) {
    try { pictures[name] = (await mermaid.render("diagram", text)).svg; }
    catch (error) { throw `${text}\n${error}`; }
  }
  return pictures;
})().then(JSON.stringify, error => `${error}`)
  .then(answer => fetch("/drawn", {method: "POST", body: answer}));
</script>
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    wanted = diagrams_in(ROOT / "docs")
    there = {path.name for path in PICTURES.glob("*.svg")}
    missing, left = sorted(wanted.keys() - there), sorted(there - wanted.keys())
    if options.check:
        for name in missing:
            print(f"no picture of: {wanted[name].strip().splitlines()[:3]}")
        for name in left:
            print(f"no diagram has the picture {name}")
        return 1 if missing or left else 0
    for name in left:
        (PICTURES / name).unlink()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, picture in draw({name: wanted[name] for name in missing}).items():
        (PICTURES / name).write_text(picture + "\n", encoding="utf-8")
    print(
        f"{len(missing)} drawn, {len(left)} removed, {len(wanted)} in {PICTURES.relative_to(ROOT)}"
    )
    return 0


def draw(diagrams: dict[str, str]) -> dict[str, str]:
    """The pictures of these diagrams, drawn by mermaid in a browser."""
    if not diagrams:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        install = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "--silent", MERMAID]
        subprocess.run(install, cwd=folder, check=True)
        page = PAGE.replace("DIAGRAMS", json.dumps(diagrams))
        Path(folder, "page.html").write_text(page, encoding="utf-8")
        answer = drawn_by_browser(folder)
    try:
        pictures = json.loads(answer)
    except ValueError:
        raise SystemExit(f"mermaid cannot draw: {answer}") from None
    return {name: as_file(svg) for name, svg in pictures.items()}


def drawn_by_browser(folder: str) -> str:
    """What the page sends back once it is shown."""
    answers: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        url = f"http://127.0.0.1:{server.server_port}/page.html"
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/user"]
        with subprocess.Popen(["chromium", *options, url], stderr=subprocess.DEVNULL) as browser:
            while not answers and browser.poll() is None:
                server.handle_request()
            browser.terminate()
    return answers[0] if answers else "the browser ended"


def as_file(svg: str) -> str:
    """A picture that stands alone: XML, with a size of its own and a white ground."""
    svg = re.sub(r"<br>", "<br/>", svg).replace("&nbsp;", "&#160;")
    box = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg)
    assert box is not None, svg[:200]
    width, height = box.groups()
    size = f'width="{float(width):.0f}" height="{float(height):.0f}"'
    svg = re.sub(r'\bwidth="100%"', size, svg, count=1)
    return svg.replace('style="max-width', 'style="background:#fff;max-width', 1)


if __name__ == "__main__":
    sys.exit(main())

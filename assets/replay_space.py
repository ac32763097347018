"""Build a static Space, or any static site, of recorded runs: `make replay-space`.

It needs no server and never sleeps: an index and one self-contained page for each recording of the lessons.
"""

from __future__ import annotations

import html
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from visualizer.lessons import lesson_trace, lessons
from visualizer.replay import MODE_WORDS, replay_page

TARGET = ROOT / "build" / "replay-space"
FRONT_MATTER = """\
---
title: Glass Engine replay
emoji: 🔍
colorFrom: blue
colorTo: gray
sdk: static
app_file: index.html
short_description: Recorded runs of an inference engine you can see through
license: mit
---

Recorded, seeded runs of Glass Engine, played in the page's own panels. Built by `make replay-space`.
"""
INDEX = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Glass Engine: recorded runs</title><link rel="icon" href="data:,">
<style>
  :root {{ color-scheme: light dark; }}
  body {{ max-width: 46rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 system-ui, sans-serif; }}
  h2 {{ margin: 1.6rem 0 0.2rem; }}
  p {{ margin: 0.2rem 0; }}
</style></head><body>
<h1>Glass Engine: recorded runs</h1>
<p>An LLM inference engine you can see through. Each page plays a real, seeded run: pause it, step, scrub.</p>
{lessons}
</body></html>
"""


def build(target: Path = TARGET) -> list[Path]:
    """Write the site anew. Returns its pages."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "README.md").write_text(FRONT_MATTER, encoding="utf-8")
    pages, parts = [], []
    for number, lesson in enumerate(lessons(), 1):
        links = []
        for place, scene in enumerate(lesson["scenes"], 1):
            arms = [(_title(name), lesson_trace(name)) for name in scene["traces"]]
            page = target / f"lesson-{number}-{place}.html"
            page.write_text(replay_page(arms, f"{lesson['title']} ({place})"), encoding="utf-8")
            pages.append(page)
            ask, reveal = html.escape(scene["ask"]), html.escape(scene["reveal"])
            links.append(f'<li><a href="{page.name}">{ask}</a><p>{reveal}</p></li>')
        parts.append(
            f"<h2>{number}. {html.escape(lesson['title'])}</h2><p>{html.escape(lesson['intro'])}</p>"
            f"<ol>{''.join(links)}</ol>"
        )
    (target / "index.html").write_text(INDEX.format(lessons="\n".join(parts)), encoding="utf-8")
    return pages


def _title(name: str) -> str:
    way = name.rpartition("-")[2]
    return f"{way}: {MODE_WORDS[way]}" if way in MODE_WORDS else name.replace("-", ": ", 1)


if __name__ == "__main__":
    print(f"{len(build())} pages in {TARGET.relative_to(ROOT)}")

"""HTML elements from Python: every text is escaped, unless it is markup already."""

from collections.abc import Iterable, Sequence
from html import escape

VOID = frozenset({"input", "br", "col"})
"""Elements without content."""


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
      tag: its name.
      *children: markup, or text that is escaped; None is left out.
      **attributes: their values, escaped. An underscore stands for a hyphen, one at the end is dropped; True is an attribute
        without a value, None and False are left out.

    Example:
      >>> element("a", "x < y", class_="name")
      '<a class="name">x &lt; y</a>'
    """
    opening = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    content = "".join(map(_escaped, filter(None, children)))
    return Html(opening if tag in VOID else f"{opening}{content}</{tag}>")


def joined(parts: Iterable[str | None], between: str = "") -> Html:
    """Several elements or texts, one after another."""
    return Html(between.join(_escaped(part) for part in parts if part))


def section(title: str, *children: str | None, note: str = "") -> Html:
    """A section of the page with its heading and, below that, a line that says what it shows."""
    anchor = "".join(c if c.isalnum() else "-" for c in title.lower())
    lead = element("p", note, class_="note") if note else None
    return element("section", element("h2", title, id=anchor), lead, *children, aria_labelledby=anchor)


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> Html:
    """A table that scrolls by itself where the page is narrow.

    Args:
      caption: its title.
      head: titles of the columns.
      rows: cells: markup, or text. The first one of a row names it.
      right: columns of numbers, which are aligned to the right.
    """
    classes = [("number" if n in right else None) for n in range(len(head))]
    titles = (element("th", h, scope="col", class_=c) for h, c in zip(head, classes, strict=True))
    body = (element("tr", *_cells(row, classes)) for row in rows)
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *titles)),
        element("tbody", *body),
    )
    return element("div", inner, class_="scrolls", tabindex=0, role="region", aria_label=caption)


def behind(summary: str, *children: str | None) -> Html:
    """Content that opens on request."""
    return element("details", element("summary", summary), *children)


def bar(share: float, label: str = "") -> Html:
    """A bar of a share between 0 and 1, for the eye alone: the number stands beside it."""
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
    return element(
        "span", element("span", style=f"width:{width}"), class_="bar", aria_hidden="true", title=label or None
    )


def _cells(row: Sequence[str], classes: Sequence[str | None]) -> Iterable[Html]:
    for n, (cell, name) in enumerate(zip(row, classes, strict=True)):
        yield element("th" if n == 0 else "td", cell, scope="row" if n == 0 else None, class_=name)


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    attribute = name.rstrip("_").replace("_", "-")
    return f" {attribute}" if value is True else f' {attribute}="{escape(str(value))}"'

"""Named colours, sizes, fonts and icons of the window, and the switch between light and dark."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import string
import sys
from importlib import resources
from typing import Literal

from PySide6.QtCore import QByteArray, QObject, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QIcon, QPainter, QPalette, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QApplication

from app.settings import DEFAULT_FONT_SIZE as DEFAULT_FONT_SIZE
from app.settings import FONT_SIZE_RANGE as FONT_SIZE_RANGE

ThemeMode = Literal["system", "light", "dark"]
THEME_MODES: tuple[ThemeMode, ...] = ("system", "light", "dark")

# Sizes in device-independent pixels, on an 8-pixel grid with a half step.
SPACE_XS = 4
SPACE_S = 8
SPACE_M = 16
SPACE_L = 24
SPACE_XL = 32
RADIUS_S = 6
RADIUS_M = 10
RADIUS_L = 14
ICON_SIZE = 16

_UI_FAMILIES = {
    "darwin": ("SF Pro Text", ".AppleSystemUIFont", "Helvetica Neue"),
    "win32": ("Segoe UI Variable Text", "Segoe UI"),
    "linux": ("Inter", "Noto Sans", "Ubuntu", "Cantarell", "Open Sans", "DejaVu Sans"),
}
_MONO_FAMILIES = (
    "JetBrains Mono",
    "Cascadia Code",
    "SF Mono",
    "Menlo",
    "Consolas",
    "Noto Sans Mono",
    "Ubuntu Mono",
    "DejaVu Sans Mono",
)
_FALLBACK_FAMILIES = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Microsoft YaHei UI",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "Noto Color Emoji",
    "Apple Color Emoji",
    "Segoe UI Emoji",
    "Symbola",
)


@dataclasses.dataclass(frozen=True)
class Theme:
    """Every colour the window uses, as "#rrggbb", and its text sizes in pixels."""

    window: str
    surface: str
    surface_raised: str
    surface_sunken: str
    border: str
    text: str
    text_muted: str
    text_faint: str
    accent: str
    accent_hover: str
    accent_text: str
    danger: str
    warning: str
    success: str
    code_background: str
    code_border: str
    user_bubble: str
    selection: str
    link: str
    chart_grid: str
    memory_weights: str
    memory_kv: str
    memory_workspace: str
    memory_draft: str
    memory_runtime: str
    memory_other: str
    memory_free: str
    owner_colors: tuple[str, ...]
    pygments_style: str
    is_dark: bool
    font_size: int = DEFAULT_FONT_SIZE

    @property
    def disabled(self) -> str:
        """The colour of text that cannot be used now."""
        return mix(self.surface, self.text, 0.42)

    @property
    def font_size_small(self) -> int:
        return self.font_size - 1

    @property
    def font_size_tiny(self) -> int:
        return self.font_size - 3

    @property
    def font_size_title(self) -> int:
        return self.font_size + 4

    @property
    def font_size_display(self) -> int:
        return self.font_size + 12

    def owner_color(self, slot: int) -> str:
        """The colour of an owner slot of the telemetry; slots beyond the palette repeat it."""
        return self.owner_colors[slot % len(self.owner_colors)]


@functools.cache
def load_theme(name: str, font_size: int = DEFAULT_FONT_SIZE) -> Theme:
    """Reads a theme by name ("light" or "dark") from the resources.

    Raises `ValueError` naming the tokens that are missing, unknown or not a colour.
    """
    data = json.loads(resources.files("resources").joinpath("themes", f"{name}.json").read_text("utf-8"))
    names = {field.name for field in dataclasses.fields(Theme)} - {"font_size"}
    if wrong := names.symmetric_difference(data):
        raise ValueError(f"theme {name}: missing or unknown tokens {', '.join(sorted(wrong))}")
    data["owner_colors"] = tuple(data["owner_colors"])
    colours = [value for key, value in data.items() if key not in ("is_dark", "pygments_style", "owner_colors")]
    for value in (*colours, *data["owner_colors"]):
        if not re.fullmatch(r"#[0-9a-f]{6}", value):
            raise ValueError(f"theme {name}: {value!r} is no colour of the form #rrggbb")
    return Theme(**data, font_size=font_size)


def mix(first: str, second: str, share: float) -> str:
    """The colour `share` of the way from `first` to `second`."""
    a, b = QColor(first), QColor(second)
    parts = ((a.red(), b.red()), (a.green(), b.green()), (a.blue(), b.blue()))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in parts)


def contrast(first: str, second: str) -> float:
    """The WCAG 2 contrast ratio of two colours, from 1 to 21."""

    def luminance(colour: str) -> float:
        c = QColor(colour)
        parts = (c.redF(), c.greenF(), c.blueF())
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


# ---------------------------------------------------------------- fonts


@functools.cache
def _installed(families: tuple[str, ...]) -> tuple[str, ...]:
    present = set(QFontDatabase.families())
    return tuple(family for family in families if family in present)


def _ui_families() -> list[str]:
    """The system's own interface font first; a distribution's better one where the system names none."""
    system = QFontDatabase.systemFont(QFontDatabase.SystemFont.GeneralFont).family()
    preferred = _installed(_UI_FAMILIES.get(sys.platform, _UI_FAMILIES["linux"]))
    generic = system.lower() in ("", "sans", "sans serif", "sans-serif", "helvetica", "ms shell dlg 2", "fixed")
    first = [*preferred, system] if generic else [system, *preferred]
    return list(dict.fromkeys(family for family in (*first, *_installed(_FALLBACK_FAMILIES)) if family))


def ui_font(pixel_size: int = DEFAULT_FONT_SIZE, *, bold: bool = False) -> QFont:
    """The interface font with fallbacks for CJK and emoji."""
    font = QFont(_ui_families())
    font.setPixelSize(pixel_size)
    font.setHintingPreference(QFont.HintingPreference.PreferNoHinting)
    if bold:
        font.setWeight(QFont.Weight.DemiBold)
    return font


def mono_font(pixel_size: int = DEFAULT_FONT_SIZE - 1) -> QFont:
    """The fixed-width font for code and figures, with the same fallbacks."""
    system = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont).family()
    families = (*_installed(_MONO_FAMILIES), system, *_installed(_FALLBACK_FAMILIES))
    font = QFont(list(dict.fromkeys(families)))
    font.setPixelSize(pixel_size)
    font.setStyleHint(QFont.StyleHint.Monospace)
    font.setHintingPreference(QFont.HintingPreference.PreferNoHinting)
    return font


# ---------------------------------------------------------------- icons


@functools.cache
def _icon_source(name: str) -> str:
    return resources.files("resources").joinpath("icons", f"{name}.svg").read_text("utf-8")


def pixmap(name: str, colour: str, size: int = ICON_SIZE, scale: float | None = None) -> QPixmap:
    """Draws `resources/icons/<name>.svg` in one colour; `scale` defaults to the screen's."""
    if scale is None:
        screen = QGuiApplication.primaryScreen()
        scale = screen.devicePixelRatio() if screen is not None else 1.0
    renderer = QSvgRenderer(QByteArray(_icon_source(name).replace("currentColor", colour).encode()))
    image = QPixmap(QSize(round(size * scale), round(size * scale)))
    image.fill(Qt.GlobalColor.transparent)
    painter = QPainter(image)
    renderer.render(painter, QRectF(image.rect()))
    painter.end()
    image.setDevicePixelRatio(scale)
    return image


def icon(name: str, colour: str, disabled: str | None = None, size: int = ICON_SIZE) -> QIcon:
    """An icon of `resources/icons` in one colour, with a second one for its disabled state."""
    result = QIcon()
    for scale in (1.0, 2.0):
        result.addPixmap(pixmap(name, colour, size, scale))
        if disabled is not None:
            result.addPixmap(pixmap(name, disabled, size, scale), QIcon.Mode.Disabled)
    return result


def application_icon() -> QIcon:
    result = QIcon()
    for size in (16, 32, 64, 128, 256):
        result.addPixmap(pixmap("kvasir", "#000000", size, 1.0))
    return result


# ---------------------------------------------------------------- applying


def style_sheet(theme: Theme) -> str:
    """The application's style sheet: `resources/style.qss.template` with the theme's tokens filled in.

    Raises `KeyError` for a token that the theme does not have.
    """
    template = resources.files("resources").joinpath("style.qss.template").read_text("utf-8")
    tokens: dict[str, object] = {field.name: getattr(theme, field.name) for field in dataclasses.fields(theme)}
    for name in ("small", "tiny", "title", "display"):
        tokens[f"font_size_{name}"] = getattr(theme, f"font_size_{name}")
    tokens |= {
        "hover": mix(theme.surface, theme.text, 0.06),
        "hover_window": mix(theme.window, theme.text, 0.06),
        "pressed": mix(theme.surface, theme.text, 0.11),
        "chosen": mix(theme.window, theme.accent, 0.16),
        "accent_soft": mix(theme.surface, theme.accent, 0.13),
        "danger_soft": mix(theme.surface, theme.danger, 0.13),
        "warning_soft": mix(theme.surface, theme.warning, 0.13),
        "scrollbar": mix(theme.surface, theme.text, 0.22),
        "scrollbar_hover": mix(theme.surface, theme.text, 0.38),
        "disabled": theme.disabled,
        "radius_s": RADIUS_S,
        "radius_m": RADIUS_M,
        "radius_l": RADIUS_L,
    }
    return string.Template(template).substitute(tokens)


def palette(theme: Theme) -> QPalette:
    """The theme as a QPalette, for what style sheets do not reach (disabled text, links, selections)."""
    result = QPalette()
    role = QPalette.ColorRole
    colours = {
        role.Window: theme.window,
        role.WindowText: theme.text,
        role.Base: theme.surface,
        role.AlternateBase: theme.surface_sunken,
        role.Text: theme.text,
        role.Button: theme.surface_raised,
        role.ButtonText: theme.text,
        role.BrightText: theme.danger,
        role.ToolTipBase: theme.surface_raised,
        role.ToolTipText: theme.text,
        role.PlaceholderText: theme.text_faint,
        role.Highlight: theme.selection,
        role.HighlightedText: theme.text,
        role.Link: theme.link,
        role.LinkVisited: theme.link,
        role.Light: theme.surface_raised,
        role.Midlight: theme.border,
        role.Mid: theme.border,
        role.Dark: theme.border,
        role.Shadow: theme.surface_sunken,
        role.Accent: theme.accent,
    }
    for which, colour in colours.items():
        result.setColor(which, QColor(colour))
    for which in (role.WindowText, role.Text, role.ButtonText):
        result.setColor(QPalette.ColorGroup.Disabled, which, QColor(theme.disabled))
    return result


class ThemeManager(QObject):
    """Holds the theme in force, follows the system's if asked to, and dresses the application in it.

    `changed` carries the new `Theme`; widgets that paint by hand connect to it.
    """

    changed = Signal(object)

    def __init__(
        self, mode: ThemeMode = "system", font_size: int = DEFAULT_FONT_SIZE, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._mode: ThemeMode = mode
        self._font_size = font_size
        self.theme = load_theme(self._wanted_name(), font_size)
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._refresh)

    @property
    def mode(self) -> ThemeMode:
        return self._mode

    def set_mode(self, mode: ThemeMode) -> None:
        self._mode = mode
        self._refresh()

    def set_font_size(self, pixels: int) -> None:
        low, high = FONT_SIZE_RANGE
        self._font_size = max(low, min(high, pixels))
        self._refresh()

    def toggle(self) -> None:
        """Switches to the other of light and dark; the system is no longer followed."""
        self.set_mode("light" if self.theme.is_dark else "dark")

    def apply(self) -> None:
        """Dresses the running application in the theme in force."""
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        application.setFont(ui_font(self.theme.font_size))
        application.setPalette(palette(self.theme))
        application.setStyleSheet(style_sheet(self.theme))

    def _wanted_name(self) -> str:
        if self._mode != "system":
            return self._mode
        return "dark" if QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Dark else "light"

    def _refresh(self, *_: object) -> None:
        theme = load_theme(self._wanted_name(), self._font_size)
        if theme != self.theme:
            self.theme = theme
            self.apply()
            self.changed.emit(theme)

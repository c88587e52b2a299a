from __future__ import annotations

import dataclasses
import string
from importlib import resources

import pygments.styles
import pytest
from PySide6.QtGui import QColor, QFontDatabase

from app import theme as themes
from app.theme import ThemeManager, contrast, load_theme, mix, pixmap, style_sheet, ui_font

NAMES = ("light", "dark")
GROUNDS = ("window", "surface", "surface_raised", "code_background")
MEANINGS = ("text", "text_muted", "text_faint", "accent", "danger", "warning", "success", "link")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("colour", MEANINGS)
def test_text_can_be_read_on_every_ground(name: str, ground: str, colour: str) -> None:
    theme = load_theme(name)
    assert contrast(getattr(theme, colour), getattr(theme, ground)) >= 4.5


@pytest.mark.parametrize("name", NAMES)
def test_text_on_the_accent_the_selection_and_the_bubble_can_be_read(name: str) -> None:
    theme = load_theme(name)
    assert contrast(theme.accent_text, theme.accent) >= 4.5
    assert contrast(theme.text, theme.selection) >= 4.5
    assert contrast(theme.text, theme.user_bubble) >= 7


@pytest.mark.parametrize("name", NAMES)
def test_owner_colours_differ_and_stand_out_from_the_ground(name: str) -> None:
    theme = load_theme(name)
    assert len(set(theme.owner_colors)) == 12
    assert all(contrast(colour, theme.surface) >= 2 for colour in theme.owner_colors)
    assert theme.owner_color(12) == theme.owner_color(0)


@pytest.mark.parametrize("name", NAMES)
def test_the_style_sheet_leaves_no_token_open(name: str, qapp: object) -> None:
    sheet = style_sheet(load_theme(name))
    assert "$" not in sheet
    assert load_theme(name).accent in sheet
    assert sheet.count("{") == sheet.count("}")


def test_every_token_of_the_style_sheet_is_one_the_theme_gives() -> None:
    template = resources.files("resources").joinpath("style.qss.template").read_text("utf-8")
    used = set(string.Template(template).get_identifiers())
    fields = {field.name for field in dataclasses.fields(themes.Theme)}
    assert used & fields, "the template uses no token at all"
    assert "border" in used


@pytest.mark.parametrize("name", NAMES)
def test_the_code_style_exists(name: str) -> None:
    pygments.styles.get_style_by_name(load_theme(name).pygments_style)


def test_a_theme_that_does_not_exist_is_no_light_theme() -> None:
    with pytest.raises(FileNotFoundError):
        load_theme("sepia")


def test_toggling_tells_the_other_theme_and_dresses_the_application(qapp) -> None:
    manager = ThemeManager("light")
    manager.apply()
    told: list[themes.Theme] = []
    manager.changed.connect(told.append)
    manager.toggle()
    assert [theme.is_dark for theme in told] == [True]
    assert manager.mode == "dark"
    assert load_theme("dark").window in qapp.styleSheet()
    assert qapp.palette().window().color() == QColor(load_theme("dark").window)
    manager.set_mode("dark")
    assert len(told) == 1, "nothing changed, so nothing is told"


def test_the_font_size_stays_within_its_range(qapp) -> None:
    manager = ThemeManager("light", 14)
    manager.set_font_size(99)
    assert manager.theme.font_size == themes.FONT_SIZE_RANGE[1]
    manager.set_font_size(1)
    assert manager.theme.font_size == themes.FONT_SIZE_RANGE[0]


def test_every_icon_draws_something_in_the_colour_it_is_given(qapp) -> None:
    icons = [entry.name for entry in resources.files("resources").joinpath("icons").iterdir()]
    assert len(icons) > 20
    for file in icons:
        image = pixmap(file.removesuffix(".svg"), "#ff0000", 32, 1.0).toImage()
        colours = {
            image.pixelColor(x, y).name() for x in range(32) for y in range(32) if image.pixelColor(x, y).alpha() > 200
        }
        assert colours, f"{file} is empty"
        if file != "kvasir.svg":
            assert colours == {"#ff0000"}, f"{file} has a colour of its own"


def test_the_interface_font_falls_back_to_fonts_with_cjk_and_emoji_where_they_are_installed(qapp) -> None:
    families = ui_font().families()
    assert families
    installed = set(QFontDatabase.families())
    for family in ("Noto Color Emoji", "Noto Sans CJK SC"):
        if family in installed:
            assert family in families


def test_mixing_goes_from_one_colour_to_the_other() -> None:
    assert mix("#000000", "#ffffff", 0.0) == "#000000"
    assert mix("#000000", "#ffffff", 1.0) == "#ffffff"
    assert mix("#000000", "#ffffff", 0.5) == "#808080"
    assert contrast("#000000", "#ffffff") == pytest.approx(21)

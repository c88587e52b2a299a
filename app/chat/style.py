"""The style sheet of the chat pages: what the application's own does not say about them."""

from __future__ import annotations

import functools

from app.theme import RADIUS_S, Theme, mix


@functools.lru_cache(maxsize=4)
def chat_style_sheet(theme: Theme) -> str:
    """Rules for the widgets of `app.chat`, set once on a chat page."""
    hover = mix(theme.surface, theme.text, 0.07)
    bubble_hover = mix(theme.surface, theme.text, 0.11)
    return f"""
#chatPage, #messageList {{ background: {theme.surface}; border: none; }}
#messageText, #codeText, #tableText {{
    background: transparent; border: none; border-radius: 0; padding: 0; margin: 0;
    selection-background-color: {theme.selection}; selection-color: {theme.text};
}}
#messageText, #tableText {{ font-size: {theme.font_size}px; }}
#authorLabel {{ color: {theme.text_muted}; font-size: {theme.font_size_small}px; font-weight: 600; }}
#figuresLabel {{ color: {theme.text_faint}; font-size: {theme.font_size_small - 1}px; }}
#siblingLabel {{ color: {theme.text_muted}; font-size: {theme.font_size_small - 1}px; }}
#statusNote {{ color: {theme.text_muted}; font-size: {theme.font_size_small}px; }}
#statusNote[tone="danger"] {{ color: {theme.danger}; }}
#statusNote[tone="warning"] {{ color: {theme.warning}; }}
#languageLabel {{ color: {theme.text_muted}; font-size: {theme.font_size_small - 1}px; }}
#chatAction {{ background: transparent; border: 1px solid transparent; border-radius: {RADIUS_S}px; padding: 0; }}
#chatAction:hover {{ background: {hover}; }}
#chatAction:pressed {{ background: {bubble_hover}; }}
#chatAction:focus {{ border-color: {theme.accent}; }}
#copyCode {{
    background: transparent; border: 1px solid transparent; border-radius: {RADIUS_S}px; padding: 0 6px;
    color: {theme.text_muted}; font-size: {theme.font_size_small - 1}px;
}}
#copyCode:hover {{ background: {hover}; color: {theme.text}; }}
#copyCode:focus {{ border-color: {theme.accent}; }}
#composerText, #editorText {{
    background: transparent; border: none; border-radius: 0; padding: 0; font-size: {theme.font_size}px;
    placeholder-text-color: {theme.text_faint};
}}
#composerHint, #contextCounter {{ color: {theme.text_faint}; font-size: {theme.font_size_small - 1}px; }}
#contextCounter[tone="warning"] {{ color: {theme.warning}; }}
#contextCounter[tone="danger"] {{ color: {theme.danger}; }}
#sendButton {{ background: {theme.accent}; border: 2px solid {theme.accent}; border-radius: 16px; padding: 0; }}
#sendButton:hover {{ background: {theme.accent_hover}; border-color: {theme.accent_hover}; }}
#sendButton:disabled {{ background: {theme.surface_sunken}; border-color: {theme.surface_sunken}; }}
#sendButton:focus {{ border-color: {theme.text}; }}
#jumpButton {{
    background: {theme.surface_raised}; color: {theme.text_muted}; border: 1px solid {theme.border};
    border-radius: 16px; padding: 0 14px 0 10px; font-size: {theme.font_size_small}px;
}}
#jumpButton:hover {{ color: {theme.text}; border-color: {theme.text_faint}; }}
#jumpButton:focus {{ border-color: {theme.accent}; }}
#welcomeTitle {{ font-size: {theme.font_size_display}px; font-weight: 600; color: {theme.text}; }}
#welcomeText {{ color: {theme.text_muted}; font-size: {theme.font_size}px; }}
#notice {{
    background: {mix(theme.surface, theme.danger, 0.1)}; border: 1px solid {mix(theme.surface, theme.danger, 0.35)};
    border-radius: {RADIUS_S}px;
}}
#noticeText {{ color: {theme.text}; font-size: {theme.font_size_small}px; }}
#findBar {{ background: {theme.surface_raised}; border: 1px solid {theme.border}; border-radius: {RADIUS_S}px; }}
#findField {{ background: transparent; border: none; padding: 2px 4px; }}
#findCount {{ color: {theme.text_faint}; font-size: {theme.font_size_small - 1}px; }}
"""

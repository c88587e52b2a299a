#!/bin/sh
# Installs the system libraries that Qt's window needs on Linux, or names them.
# Never fails the set-up: the command line works without them.
[ "$(uname -s)" = Linux ] || exit 0

# library file -> Debian package
wanted="
libEGL.so.1 libegl1
libGL.so.1 libgl1
libxkbcommon-x11.so.0 libxkbcommon-x11-0
libxcb-cursor.so.0 libxcb-cursor0
libxcb-icccm.so.4 libxcb-icccm4
libxcb-keysyms.so.1 libxcb-keysyms1
libxcb-shape.so.0 libxcb-shape0
libxcb-image.so.0 libxcb-image0
libxcb-render-util.so.0 libxcb-render-util0
libdbus-1.so.3 libdbus-1-3
libfontconfig.so.1 libfontconfig1
"

known=$( (ldconfig -p || /sbin/ldconfig -p) 2>/dev/null)
missing=$(echo "$wanted" | while read -r file package; do
    [ -z "$file" ] || case "$known" in *"$file "*) ;; *) echo "$package" ;; esac
done | tr '\n' ' ')
fonts=""
if ! command -v fc-list >/dev/null 2>&1 || [ -z "$(fc-list 2>/dev/null | head -n 1)" ]; then
    fonts="fontconfig fonts-dejavu-core"
fi
[ -n "$missing$fonts" ] || exit 0

if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then
        as_root=""
    elif sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        echo "Kvasir's window needs some system libraries. Install them with:"
        echo "  sudo apt-get install $missing$fonts"
        exit 0
    fi
    echo "Installing system libraries for the window: $missing$fonts"
    # shellcheck disable=SC2086
    if ! { $as_root apt-get -qq update && $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y $missing $fonts >/dev/null; }; then
        echo "That did not work. The window may not open until you install: $missing$fonts" >&2
    fi
else
    echo "Kvasir's window needs these libraries; install them with your package manager"
    echo "(named here as Debian names them): $missing$fonts"
fi
exit 0

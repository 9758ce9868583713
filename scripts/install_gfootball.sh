#!/usr/bin/env bash
# Install gfootball 2.10.2, the original football engine, into the activated environment.
#
# It is compiled, which takes about ten minutes, with libraries of the system: as root the packages
# that are missing are installed, otherwise they are named. Tried on Debian 12 with Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "install_gfootball: $*" >&2
    exit 1
}

[[ -n ${VIRTUAL_ENV:-} ]] || fail "activate a virtual environment first: source .venv/bin/activate"

packages=(
    g++ make cmake libopengl-dev libsdl2-dev libsdl2-image-dev libsdl2-ttf-dev libsdl2-gfx-dev
    libboost-python-dev libboost-thread-dev libboost-filesystem-dev
)
missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>&1 || true)
    [[ $status == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
    install=(apt-get install -y --no-install-recommends "${missing[@]}")
    ((EUID == 0)) || fail "packages are missing: sudo ${install[*]}"
    apt-get update
    "${install[@]}"
fi

boost=libboost_python$(python -c 'import sys; print(*sys.version_info[:2], sep="")').so
[[ $(ldconfig -p) == *"$boost"* ]] ||
    fail "no $boost: the system's Boost is for another Python than $VIRTUAL_ENV has"

# Not what gfootball asks for beside: its pygame and OpenCV overwrite the files of pygame-ce and
# opencv-python-headless, and the engine alone needs neither, nor Gym.
python -m pip install -c constraints.txt setuptools wheel
python -m pip install -c constraints.txt --no-build-isolation --no-deps gfootball==2.10.2
python -c 'import gfootball_engine; print("gfootball is installed")'

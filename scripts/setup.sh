#!/usr/bin/env bash
# Makes sure that everything the build and the tests need is there, and says what it does.
# Needs cargo. Installs the rest from Debian's packages, and touches nothing when it is all there.
set -euo pipefail

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

has() { command -v "$1" >/dev/null 2>&1; }

has cargo || fail "cargo is missing: install Rust (https://rustup.rs), then run this again"

# The oldest Rust that the workspace builds with, from its own manifest.
oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rust=$(rustc --version | cut -d ' ' -f 2)
if [ "$(printf '%s\n%s\n' "$oldest" "$rust" | sort -V | head -n 1)" != "$oldest" ]; then
    fail "Rust $rust is too old, $oldest is needed: run \`rustup update stable\`"
fi

for part in fmt clippy; do
    cargo "$part" --version >/dev/null 2>&1 && continue
    component=${part/#fmt/rustfmt}
    has rustup || fail "cargo $part is missing: install the component $component of your Rust"
    say "adding the Rust component $component"
    rustup component add "$component"
done

# program : Debian package that has it
packages=()
while read -r program package; do
    has "$program" || has "/usr/sbin/$program" || packages+=("$package")
done <<'LIST'
cc build-essential
protoc protobuf-compiler
etcd etcd-server
LIST

if [ ${#packages[@]} -eq 0 ]; then
    say "everything is there"
    exit 0
fi

has apt-get || fail "missing: ${packages[*]} (Debian's names). Install them with your system's package manager"
root=()
if [ "$(id -u)" -ne 0 ]; then
    has sudo || fail "missing: ${packages[*]}. Run as root: apt-get install ${packages[*]}"
    root=(sudo)
fi
say "installing ${packages[*]} with apt-get"
"${root[@]}" apt-get update -q
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}"
say "done"

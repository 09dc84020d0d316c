#!/usr/bin/env bash
# Proves that the pure crates are pure: nothing that does input or output is among what they are built from, and
# clippy forbids them the standard library's clocks, files, sockets, threads and processes.
set -euo pipefail
cd "$(dirname "$0")/.."

# crate : folder
pure="reknit-layout:daemon/layout reknit-engine:daemon/engine reknit-sim:daemon/sim"

# Every crate that a pure crate may be built from. Anything else must be looked at before it is added here.
allowed="reknit-layout reknit-engine reknit-sim
serde serde_core serde_derive serde_json itoa memchr ryu zmij
toml toml_datetime toml_parser toml_writer serde_spanned winnow
thiserror thiserror-impl proc-macro2 quote syn unicode-ident"

# What clippy must forbid in each of them.
forbidden="std::time::Instant::now std::time::SystemTime::now std::thread::spawn std::thread::sleep
std::env::var std::env::var_os std::env::args
std::fs::read std::fs::read_to_string std::fs::write std::fs::File::open std::fs::File::create
std::net::TcpStream::connect std::net::TcpListener::bind std::process::Command::new"

problems=0
problem() {
    echo "purity: $*" >&2
    problems=$((problems + 1))
}

for entry in $pure; do
    crate=${entry%%:*} folder=${entry#*:}
    used=$(cargo tree --locked -p "$crate" -e normal,build --prefix none --format '{p}' | awk '{ print $1 }' | sort -u)
    [ -n "$used" ] || problem "$crate: cargo tree says nothing"
    for dependency in $used; do
        grep -qx -- "$dependency" <<<"$(tr ' ' '\n' <<<"$allowed")" ||
            problem "$crate depends on $dependency, which is not known to be pure"
    done
    for method in $forbidden; do
        grep -qF "\"$method\"" "$folder/clippy.toml" ||
            problem "$folder/clippy.toml does not forbid $method"
    done
done

[ "$problems" -eq 0 ] || { echo "purity: $problems problems" >&2; exit 1; }
echo "purity: reknit-layout, reknit-engine and reknit-sim are pure"

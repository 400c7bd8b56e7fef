# shellcheck shell=bash
# Shared by script/* and .ci/run: messages, checks of the machine, Debian packages. Sourced, never run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

step() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }

# die MESSAGE [HINT...]: what happened, then what to do.
die() {
  printf 'error: %s\n' "$1" >&2
  shift
  for hint in "$@"; do printf '  hint: %s\n' "$hint" >&2; done
  exit 1
}

need_root() {
  [ "$(id -u)" = 0 ] || die "$1 needs root: sandboxes are made of namespaces, mounts and control groups" \
    "start it again with sudo, or as root"
}

# at_least WANTED FOUND: compares versions.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

need_kernel() {
  local found
  found=$(uname -r)
  at_least 6.12 "${found%%[!0-9.]*}" || die "Linux 6.12 or newer is needed, this is $found" \
    "Debian 13 has it; on Debian 12 take linux-image-$(dpkg --print-architecture 2>/dev/null || echo amd64) from bookworm-backports, then reboot" \
    "\`bivouac doctor\` tells what the engine uses of it"
}

# need_packages PROBE=PACKAGE...: installs from Debian what is missing. A probe is a command, or an absolute path.
need_packages() {
  local pair probe missing=()
  for pair in "$@"; do
    probe=${pair%%=*}
    case "$probe" in
      /*) [ -e "$probe" ] || missing+=("${pair#*=}") ;;
      *) command -v "$probe" >/dev/null 2>&1 || missing+=("${pair#*=}") ;;
    esac
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  command -v apt-get >/dev/null 2>&1 || die "missing on this machine: ${missing[*]} (Debian's names)" \
    "this is not Debian: install them with your package manager, then start the script again"
  step "Debian packages: ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "apt-get could not install ${missing[*]}" "mend what it says above, then start the script again"
  fi
  rm -f "$log"
}

# What building needs, and what sandboxes of the `host` image see of the host's /usr.
need_build_packages() {
  need_packages cc=gcc /usr/include/stdio.h=libc6-dev mkfs.btrfs=btrfs-progs git=git curl=curl sudo=sudo \
    ssh=openssh-client rsync=rsync \
    /etc/ssl/certs/ca-certificates.crt=ca-certificates
}

# What building the universal image needs besides npm (need_node).
need_image_packages() {
  need_packages mmdebstrap=mmdebstrap mkfs.erofs=erofs-utils mkfs.btrfs=btrfs-progs mount=mount \
    /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring
}

# Debian's docker-registry, unpacked beside the build: installing it would start a service.
need_registry() {
  local folder=$root/target/tools/registry work
  [ ! -x "$folder/usr/bin/docker-registry" ] && [ ! -x /usr/bin/docker-registry ] || return 0
  step "Debian package: docker-registry (unpacked into ${folder#"$root"/})"
  work=$(mktemp -d)
  # _apt downloads into it.
  chmod 755 "$work"
  if ! (cd "$work" && { apt-get download docker-registry || { apt-get update -q && apt-get download docker-registry; }; }) \
    >"$work/log" 2>&1 </dev/null || ! { mkdir -p "$folder" && dpkg-deb -x "$work"/docker-registry_*.deb "$folder"; }; then
    tail -n 20 "$work/log" >&2
    rm -rf "$work"
    die "apt-get could not fetch docker-registry" "mend what it says above, then start the script again"
  fi
  rm -rf "$work"
}

need_rust() {
  local wanted found debian
  if ! command -v cargo >/dev/null 2>&1 && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
    PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
  fi
  wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$root/Cargo.toml")
  found=$(rustc --version 2>/dev/null | cut -d' ' -f2)
  if command -v cargo >/dev/null 2>&1 && [ -n "$found" ] && at_least "$wanted" "${found%%-*}"; then return 0; fi
  local hints=("install it with rustup (https://rustup.rs), then start the script again")
  debian=$(apt-cache policy cargo-web 2>/dev/null | sed -n 's/^ *Candidate: *\([0-9.]*\).*/\1/p')
  if [ -n "$debian" ] && at_least "$wanted" "$debian"; then
    hints+=("or Debian's newer one: apt-get install rustc-web cargo-web ($debian; it replaces the packages rustc and cargo)")
  fi
  die "Rust $wanted or newer is needed, found ${found:-none}" "${hints[@]}"
}

# Folder of the engine's state, as the engine itself chooses it (CONTRIBUTING.md, "Names").
data_dir() {
  if [ -n "${BIVOUAC_DATA_DIR:-}" ]; then
    printf '%s\n' "$BIVOUAC_DATA_DIR"
  else
    printf '/var/lib/bivouac\n'
  fi
}

# json_field FILE KEY: a string or number of a flat JSON object.
json_field() {
  sed -n "s/.*\"$2\" *: *\"\{0,1\}\([^\",}]*\)\"\{0,1\}.*/\1/p" "$1" 2>/dev/null | head -n 1
}

# engine_url: base URL of the engine of this data folder if it answers, else nothing and 1.
engine_url() {
  local address
  address=$(json_field "$(data_dir)/engine.json" address)
  [ -n "$address" ] || return 1
  address="http://${address#http://}"
  curl -fsS -o /dev/null --max-time 5 "$address/health" 2>/dev/null || return 1
  printf '%s\n' "$address"
}

# Node 20 or newer for the tests and the SDK, first on PATH. Debian 12's is 18: then npm's package of the binary.
need_node() {
  local major arch=x64
  node_major() { node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0; }
  need_packages node=nodejs npm=npm
  major=$(node_major)
  [ "$major" -lt 20 ] || return 0
  [ "$(uname -m)" = x86_64 ] || arch=arm64
  local folder=$root/target/tools/node
  if [ ! -x "$folder/node_modules/node-linux-$arch/bin/node" ]; then
    step "Node 22 from npm (Debian's is $major)"
    mkdir -p "$folder"
    npm install --prefix "$folder" --no-audit --no-fund --no-save --silent "node-linux-$arch@22" </dev/null ||
      die "npm could not install node-linux-$arch@22" "put a Node of version 20 or newer on PATH, then start the script again"
  fi
  PATH="$folder/node_modules/node-linux-$arch/bin:$PATH"
}

# Python with what makes virtual environments; Debian packs that separately.
need_python() {
  need_packages python3=python3
  need_packages "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/ensurepip/__init__.py=python3-venv"
}

# python_for REQUIREMENTS: an interpreter below target/ with exactly those packages; prints its path.
python_for() {
  local wanted=$1 name folder mark
  name=$(basename "$(dirname "$wanted")")
  folder=$root/target/tools/python-$name
  mark="$(sha256sum <"$wanted") $(python3 -c 'import sys; print(sys.version)') $folder"
  if [ "$(cat "$folder/mark" 2>/dev/null)" != "$mark" ]; then
    rm -rf "$folder"
    mkdir -p "$folder"
    python3 -m venv "$folder" >&2 &&
      timeout -k 20 300 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --require-hashes -r "$wanted" >&2 </dev/null || return 1
    printf '%s' "$mark" >"$folder/mark"
  fi
  printf '%s\n' "$folder/bin/python"
}

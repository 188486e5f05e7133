# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Shared by the commands in scripts/: installing missing packages, configuring and building by preset, and
# stages with a time. Source it after `set -euo pipefail`.

KVPOLICY_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$KVPOLICY_ROOT" || exit
JOBS=${JOBS:-$(nproc)}
LOGS=build/logs
STAGES=()  # "seconds name", in order
# Waiting OpenMP threads spin, which is very slow where other programs use the cores, so they give up soon.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}

say() { printf '%s\n' "$*"; }
heading() { printf '\n== %s\n' "$*"; }
die() {
  printf '\nerror: %s\n' "$*" >&2
  exit 1
}

# ---- packages --------------------------------------------------------------------------------
# name | reason | a command that replaces the package if it is on the PATH
BASE_PACKAGES='
g++|the C++20 compiler|command g++
cmake|configures the build (3.25 or newer)|command cmake
ninja-build|runs the build|command ninja
ccache|keeps compiled objects, so that rebuilds are quick|command ccache
pkg-config|finds libraries|command pkg-config
libhwy-dev|Highway: SIMD for the CPU engine|
nlohmann-json3-dev|reads plans, patterns and checkpoints|
libcli11-dev|command lines of the tools|
libcpp-httplib-dev|cpp-httplib: the server of examples/serve|
libfmt-dev|prints their tables|
libdnnl-dev|oneDNN: matrix products of the reference model|
libopenblas-dev|OpenBLAS: the same, where oneDNN is missing|
libicu-dev|ICU: Unicode for the tokenizers|
libsentencepiece-dev|SentencePiece: tokenizer.model|'
TEST_PACKAGES='
doctest-dev|the test framework|
libboost-context-dev|Boost.Context: threads of the kernels that run without a GPU|
libbenchmark-dev|Google Benchmark: the benches|
python3-cffi|calls the C interface from another language|
python3-jinja2|renders the chat templates that ours are compared with|
libopenmpi-dev|Open MPI: the reference model over several processes|
openmpi-bin|its mpirun|'
DOCS_PACKAGES='
doxygen|builds the site of docs/ (pages alone are readable without it)|command doxygen
python3|filters its pages and makes the list of names|command python3'
AARCH64_PACKAGES='
g++-aarch64-linux-gnu|compiles for 64-bit ARM|command aarch64-linux-gnu-g++
qemu-user-static|runs what it compiled|command qemu-aarch64-static'

# The version of clang on this system: 14 on Debian 12, else 18, else whichever is installed.
clang_version() {
  local preferred=18 version
  if grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release; then preferred=14; fi
  for version in "$preferred" 21 20 19 18 17 16 15 14; do
    if command -v "clang++-$version" >/dev/null; then
      echo "$version"
      return
    fi
  done
  echo "$preferred"
}

# clang_packages: prints lines of the same form.
clang_packages() {
  local version
  version=$(clang_version)
  cat <<EOT
clang-$version|the second compiler, and libFuzzer|command clang++-$version
libclang-rt-$version-dev|its sanitizer and fuzzer runtimes|
libomp-$version-dev|its OpenMP|
EOT
}

# missing_packages < lines: prints the lines whose package is missing.
missing_packages() {
  local name why probe installed
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' 2>/dev/null |
    sed -n 's/^installed //p')
  while IFS='|' read -r name why probe; do
    [ -n "$name" ] || continue
    case $probe in
      "command "*) command -v "${probe#command }" >/dev/null && continue ;;
    esac
    grep -qxF -- "$name" <<<"$installed" || printf '%s|%s|\n' "$name" "$why"
  done
}

# need_packages [--clang] [--docs] [--aarch64]: installs missing packages, or prints how.
need_packages() {
  local wanted=$BASE_PACKAGES$TEST_PACKAGES missing name why
  if [ "${KVPOLICY_SKIP_PACKAGES:-0}" = 1 ]; then return; fi
  if ! command -v dpkg-query >/dev/null; then
    say "packages: not a Debian or Ubuntu system; if the build stops, see CONTRIBUTING.md for the list"
    return
  fi
  local part
  for part in "$@"; do
    case $part in
      --clang) wanted+=$'\n'$(clang_packages) ;;
      --docs) wanted+=$DOCS_PACKAGES ;;
      --aarch64) wanted+=$AARCH64_PACKAGES ;;
    esac
  done
  missing=$(missing_packages <<<"$wanted")
  if [ -z "$missing" ]; then return; fi

  heading "Packages that are missing"
  local names=()
  while IFS='|' read -r name why _; do
    printf '  %-22s %s\n' "$name" "$why"
    names+=("$name")
  done <<<"$missing"
  local line="apt-get install -y --no-install-recommends ${names[*]}"
  if [ "$(id -u)" != 0 ]; then
    say ""
    say "They come from the system's own packages, and installing them needs root. Please run"
    say "  sudo apt-get update && sudo $line"
    say "and start this command again. (KVPOLICY_SKIP_PACKAGES=1 goes on without them.)"
    exit 1
  fi
  mkdir -p "$LOGS"
  say "installing them (log: $LOGS/packages.log)"
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive $line; } 2>&1 |
    tee "$LOGS/packages.log" | grep --line-buffered -E '^(Setting up|E:|Err:)' | sed -u 's/^/  /'; then
    die "packages could not be installed; the end of $LOGS/packages.log says why:
$(tail -n 5 "$LOGS/packages.log")"
  fi
}

# ---- stages ----------------------------------------------------------------------------------
# stage NAME COMMAND...: runs the command, records its time, and returns its status. Where the run has a limit, says how
# much of it is left.
stage() {
  local name=$1 start=$SECONDS status=0
  shift
  STAGE=$name # shellcheck disable=SC2034 # for who sources this
  heading "$name"
  "$@" || status=$?
  STAGES+=("$((SECONDS - start)) $name$([ $status = 0 ] || echo ' (failed)')")
  if [ -n "${KVPOLICY_DEADLINE:-}" ]; then
    say "  after $(((SECONDS - start + 30) / 60)) minutes, $(((KVPOLICY_DEADLINE - $(date +%s)) / 60)) are left"
  fi
  return $status
}

stage_times() {
  local entry
  heading "Time"
  for entry in "${STAGES[@]}"; do
    printf '  %5d s  %s\n' "${entry%% *}" "${entry#* }"
  done
}

# ---- building --------------------------------------------------------------------------------
# configure PRESET [cmake arguments...]: prints output only if it fails.
configure() {
  local preset=$1 log
  shift
  mkdir -p "$LOGS"
  log=$LOGS/$preset-configure.log
  case $preset in
    asan | fuzz)
      local version
      version=$(clang_version)
      [ "$version" = 14 ] || set -- "$@" "-DCMAKE_CXX_COMPILER=clang++-$version"
      ;;
  esac
  if ! cmake --preset "$preset" "$@" >"$log" 2>&1; then
    tail -n 25 "$log"
    say "configuring preset '$preset' failed (all of it: $log)"
    return 1
  fi
  grep -E 'kvpolicy: |Warning' "$log" | sed 's/^-- /  /' || true
}

# build PRESET [targets...]: shows ninja's own progress, on a terminal in one line.
build() {
  local preset=$1
  shift
  NINJA_STATUS='  [%f/%t] ' cmake --build --preset "$preset" -j "$JOBS" ${1:+--target "$@"}
}

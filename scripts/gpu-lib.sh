# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Shared by gpu-test, gpu-attention and gpu-model: finding the device, a build for it, and dependencies from
# an unpacked folder on machines without a network. Source it after lib.sh.

OUT=bench/results
PREFIX=
BUILD=build/gpu
ARCHITECTURE=
STEM= # of the names of results: gpu_nvidia_h100_80gb_hbm3

# Prints the part of --help that all of them share.
gpu_common_help() {
  cat <<'EOT'
  --prefix DIR       dependencies that are not installed here: a folder with their usr/, as
                     --make-prefix leaves it
  --make-prefix DIR  make such a folder from this machine's Debian or Ubuntu packages (root is not
                     needed), and stop: for machines without a network
  --out DIR          results go here (default bench/results)
  --build DIR        build folder (default build/gpu); a second run rebuilds nothing
EOT
}

# gpu_option ARGUMENTS...: takes one common option; sets TAKEN to its number of words, 0 for other options.
gpu_option() {
  TAKEN=2
  case $1 in
    --prefix | --make-prefix | --out | --build)
      [ $# -ge 2 ] || die "$1 needs a folder"
      ;;&
    --prefix) PREFIX=$(cd "$2" 2>/dev/null && pwd) || die "--prefix $2: there is no such folder" ;;
    --make-prefix) make_prefix "$2"; exit 0 ;;
    --out) OUT=$2 ;;
    --build) BUILD=$2 ;;
    *) TAKEN=0 ;;
  esac
}

# Only small packages: reference BLAS instead of OpenBLAS, because nothing is multiplied on the CPU.
PREFIX_PACKAGES='libbenchmark-dev libbenchmark1debian doctest-dev nlohmann-json3-dev libblas-dev
                 libblas3 libgfortran5 libquadmath0'

# make_prefix DIR: downloads the packages and unpacks them there.
make_prefix() {
  local dir=$1 debs name missing=()
  command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    die "--make-prefix works on Debian and Ubuntu; elsewhere unpack the packages by hand: $PREFIX_PACKAGES"
  mkdir -p "$dir/debs"
  dir=$(cd "$dir" && pwd)
  debs=$dir/debs
  for name in $PREFIX_PACKAGES; do
    (cd "$debs" && apt-get download "$name") >/dev/null 2>&1 || missing+=("$name")
  done
  for name in "$debs"/*.deb; do
    [ -e "$name" ] || die "no package could be downloaded (apt-get update first?)"
    dpkg -x "$name" "$dir"
  done
  rm -r "$debs"
  # The BLAS library is only reachable through links that its installation would make.
  local blas
  for blas in "$dir"/usr/lib/*/blas; do
    [ -d "$blas" ] || continue
    find "$blas" -name 'libblas.*' -exec cp -a {} "$blas/.." \;
  done
  # Newer releases have given some packages other names.
  [ ${#missing[@]} = 0 ] || say "not to be had here, perhaps under another name: ${missing[*]}"
  say "unpacked to $dir ($(du -sh "$dir" | cut -f 1)); carry it along and pass --prefix"
}

# need_gpu: stops with a sentence unless there is a device and a compiler.
need_gpu() {
  local capability
  if ! command -v nvcc >/dev/null; then
    [ -x /usr/local/cuda/bin/nvcc ] ||
      die "there is no nvcc: install the CUDA Toolkit 12 or newer and put its bin folder on the PATH.
(Without a GPU the same kernels run in the emulated tests: ./scripts/test)"
    PATH=/usr/local/cuda/bin:$PATH
  fi
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 || true)
  [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] ||
    die "there is no NVIDIA GPU here (nvidia-smi finds none).
The same kernels run without one in the emulated tests: ./scripts/test"
  ARCHITECTURE=${capability/./}
  [ "$ARCHITECTURE" -ge 80 ] ||
    die "the GPU has compute capability $capability; the kernels need 8.0 or newer (A100, RTX 30 and later)"
  if [ "$ARCHITECTURE" = 90 ]; then ARCHITECTURE=90a; fi # with Hopper's own instructions
  # As ./scripts/gpu-results calls them.
  STEM=gpu_$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9\n' _)
  STEM=${STEM%_}
  say "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1), sm_$ARCHITECTURE"
}

# gpu_configure TESTS(ON/OFF): configures a build for only the present device.
gpu_configure() {
  local tests=$1 log=$LOGS/gpu-configure.log options=()
  mkdir -p "$LOGS"
  command -v ninja >/dev/null && options+=(-G Ninja)
  if [ -n "$PREFIX" ]; then
    options+=("-DCMAKE_PREFIX_PATH=$PREFIX/usr;$PREFIX" -DKVPOLICY_MATMUL=auto)
    local libraries
    libraries=$(find "$PREFIX" -name '*.so*' -printf '%h\n' | sort -u | paste -sd :)
    export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  fi
  if ! cmake -S . -B "$BUILD" "${options[@]}" -DCMAKE_BUILD_TYPE=Release -DKVPOLICY_WITH_CUDA=ON \
    -DKVPOLICY_CUDA_ARCHITECTURES="$ARCHITECTURE" -DKVPOLICY_BUILD_TESTS="$tests" \
    -DKVPOLICY_BUILD_EXAMPLES=OFF -DKVPOLICY_INSTALL=OFF >"$log" 2>&1; then
    tail -n 25 "$log"
    die "configuring failed (all of it: $log)"
  fi
  grep -E 'kvpolicy: |Warning' "$log" | sed 's/^-- /  /' || true
}

# gpu_build TARGETS...: dies if one of them cannot be built.
gpu_build() {
  local log=$LOGS/gpu-build.log
  if ! cmake --build "$BUILD" -j "$JOBS" --target "$@" >"$log" 2>&1; then
    grep -E -A 5 'error|No rule|unknown target' "$log" | head -n 30 || tail -n 30 "$log"
    die "building $* failed (all of it: $log; what is missing stands in $LOGS/gpu-configure.log)"
  fi
}

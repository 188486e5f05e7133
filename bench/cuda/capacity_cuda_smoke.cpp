// SPDX-License-Identifier: Apache-2.0
//
// The capacity bench on the host emulation (tests/simt), to test that its host code runs.
#include "capacity_cuda_bench.cu"

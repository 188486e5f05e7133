// SPDX-License-Identifier: Apache-2.0
//
// The triforce bench on the host emulation (tests/simt), to test that its host code runs.
#include "triforce_cuda_bench.cu"

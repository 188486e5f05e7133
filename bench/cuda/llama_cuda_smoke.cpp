// SPDX-License-Identifier: Apache-2.0
//
// The llama bench on the host emulation (tests/simt), to test that its host code runs.
#include "llama_cuda_bench.cu"

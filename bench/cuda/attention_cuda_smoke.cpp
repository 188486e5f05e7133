// SPDX-License-Identifier: Apache-2.0
//
// The attention bench for the host emulation (tests/simt), so that each of its cases is verified
// where no GPU is. What it times is the emulation.
#include "attention_cuda_bench.cu"

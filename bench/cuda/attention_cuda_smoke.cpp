// SPDX-License-Identifier: Apache-2.0
//
// The attention bench on the host emulation (tests/simt), so that each of its cases is also
// verified on machines without a GPU. Its times are those of the emulation.
#include "attention_cuda_bench.cu"

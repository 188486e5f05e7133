// SPDX-License-Identifier: Apache-2.0
//
// The llama bench for the host emulation (tests/simt): does its host code run where no GPU is?
#include "llama_cuda_bench.cu"

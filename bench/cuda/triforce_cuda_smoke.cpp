// SPDX-License-Identifier: Apache-2.0
//
// The triforce bench for the host emulation (tests/simt): does its host code run where no GPU is?
#include "triforce_cuda_bench.cu"

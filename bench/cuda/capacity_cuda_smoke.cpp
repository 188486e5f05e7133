// SPDX-License-Identifier: Apache-2.0
//
// The capacity bench for the host emulation (tests/simt): does its host code run where no GPU is?
#include "capacity_cuda_bench.cu"

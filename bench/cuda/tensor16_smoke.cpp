// SPDX-License-Identifier: Apache-2.0
//
// The rows of the benches on the host emulation (tests/simt).
#include "tensor16.cu"

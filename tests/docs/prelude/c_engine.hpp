// SPDX-License-Identifier: Apache-2.0
//
// The C++ file between an engine in C and its cache.
// needs: cpu
#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/duo.hpp>
// each block
BLOCK

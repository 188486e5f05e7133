// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the CUDA Toolkit's header of this name, on host memory: the part of the runtime that
// kvpolicy's host code uses, so that the whole engine runs in the emulation. Same names and
// numbers; calls throw nothing but simt::Fault, from a kernel that broke a rule.
//
// A stream does its work at once, unless it is being captured (then nothing happens before the
// graph is launched) or simt::device().late is set (then nothing happens before somebody waits).
#pragma once

#include <simt/runtime_memory.hpp>
#include <simt/runtime_streams.hpp>

#define CUDART_VERSION 13000

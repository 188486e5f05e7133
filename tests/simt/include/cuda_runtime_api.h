// SPDX-License-Identifier: Apache-2.0
//
// Stand-in for the CUDA Toolkit's header of this name, on host memory: the part of the runtime that
// kvpolicy's host code uses, so that the whole engine runs in the emulation. Names and numbers are the
// toolkit's. Calls only throw simt::Fault, from a kernel that broke a rule.
//
// A stream does its work at once, unless it is being captured (the work then runs when the graph is launched)
// or simt::device().late is set (it then runs when the stream is waited for).
#pragma once

#include <simt/runtime_memory.hpp>
#include <simt/runtime_streams.hpp>

#define CUDART_VERSION 13000

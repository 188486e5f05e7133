# SPDX-License-Identifier: Apache-2.0
#
# kvpolicy::compiled: a library, static or shared as BUILD_SHARED_LIBS says. Each file of compiled/ has the
# engine for one instruction set; everything else in them, the standard library's functions included, is
# compiled for every processor of the architecture, since a linker keeps one copy of such a function for
# the whole program.
set(folder "${PROJECT_SOURCE_DIR}/compiled")
set(KVPOLICY_COMPILED_X86 FALSE)
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(KVPOLICY_COMPILED_X86 TRUE)
endif()

set(sources "${folder}/engine.cpp" "${folder}/baseline.cpp")
if(KVPOLICY_COMPILED_X86)
  list(APPEND sources "${folder}/sse4.cpp" "${folder}/avx2.cpp" "${folder}/avx512.cpp")
endif()
kvpolicy_add_component(compiled SOURCES ${sources} PRIVATE_LIBS hwy::hwy)
target_include_directories(kvpolicy_compiled PRIVATE "${folder}")
if(KVPOLICY_COMPILED_X86)
  target_compile_definitions(kvpolicy_compiled PRIVATE KVPOLICY_COMPILED_X86)
  # After CMAKE_CXX_FLAGS, whose -march=native it replaces.
  target_compile_options(kvpolicy_compiled PRIVATE -march=x86-64 -mtune=generic)
endif()

# SPDX-License-Identifier: Apache-2.0
#
# How our own programs (tests, examples, tools, benches, the reference model) are built. Nothing here
# affects a consumer: the flags belong to one target that is never exported.
set(CMAKE_CXX_EXTENSIONS OFF)

include(KvpolicyBatches)

set(KVPOLICY_WARNING_FLAGS -Wall -Wextra -Wconversion -Wshadow -pedantic)
add_library(kvpolicy_program_flags INTERFACE)
target_compile_options(kvpolicy_program_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${KVPOLICY_WARNING_FLAGS};$<$<BOOL:${KVPOLICY_WARNINGS_AS_ERRORS}>:-Werror>>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 12 warns of an overlap in every "text" + std::string (its bug 105651).
  target_compile_options(kvpolicy_program_flags INTERFACE -Wno-restrict)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Which reads and writes g++ warns about depends on how far it has inlined the standard library, and
  # so on the optimisation level and the processor. Such a warning is shown, but it must not break a
  # build that passes on another machine.
  foreach(guess array-bounds free-nonheap-object maybe-uninitialized stringop-overflow stringop-overread)
    target_compile_options(kvpolicy_program_flags INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:-Wno-error=${guess}>")
  endforeach()
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # Off because -Wconversion of g++ does not include it. What consumers include is compiled without this
  # option (tests/consumer).
  target_compile_options(kvpolicy_program_flags INTERFACE -Wno-sign-conversion)
endif()
if(KVPOLICY_ENABLE_SANITIZERS)
  # AddressSanitizer also stops at null pointers and dead objects; checking them at every use doubles
  # the compile time.
  set(sanitizer_flags -fsanitize=address,undefined -fno-sanitize=null,vptr,object-size
                      -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(kvpolicy_program_flags INTERFACE ${sanitizer_flags})
  target_link_options(kvpolicy_program_flags INTERFACE ${sanitizer_flags})
endif()
if(KVPOLICY_BUILD_FUZZERS)
  # All code gives coverage feedback; only the fuzz targets link libFuzzer's main.
  target_compile_options(kvpolicy_program_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# What compiles for longer than it runs, tests and the code around the library in tools (options, tables, files): -O1
# takes two thirds of the time of -O3. (With the library inlined by halves, g++ 12 sees vectors that overflow and
# std::optional read without a value.)
set(KVPOLICY_SHORT_COMPILE "$<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU,Clang>>:-O1>")
foreach(guess array-bounds maybe-uninitialized stringop-overflow)
  list(APPEND KVPOLICY_SHORT_COMPILE
       "$<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>>:-Wno-${guess}>")
endforeach()
add_library(kvpolicy_short_compile INTERFACE)
target_compile_options(kvpolicy_short_compile INTERFACE ${KVPOLICY_SHORT_COMPILE})

# Compiles the shipped policies once, with the flags of our own programs, for all tests and tools that link this library
# (kvpolicy/instances.hpp): otherwise every file that names policies compiles them again, which was half of a build. Most
# tools have rows of bfloat16 alone; kvpolicy_program_policies adds those of float and float16.
add_library(kvpolicy_tool_policies STATIC "${PROJECT_SOURCE_DIR}/compiled/policies_bfloat16.cpp")
target_link_libraries(kvpolicy_tool_policies PUBLIC kvpolicy::kvpolicy PRIVATE kvpolicy_program_flags)
target_compile_definitions(kvpolicy_tool_policies INTERFACE KVPOLICY_SEPARATE_COMPILATION)
add_library(kvpolicy_program_policies STATIC "${PROJECT_SOURCE_DIR}/compiled/policies_float.cpp"
                                             "${PROJECT_SOURCE_DIR}/compiled/policies_float16.cpp")
target_link_libraries(kvpolicy_program_policies PUBLIC kvpolicy_tool_policies PRIVATE kvpolicy_program_flags)

# Only the tools need OpenMP; the library takes any parallel_for.
find_package(OpenMP QUIET COMPONENTS CXX)
add_library(kvpolicy_openmp INTERFACE)
if(OpenMP_CXX_FOUND)
  target_link_libraries(kvpolicy_openmp INTERFACE OpenMP::OpenMP_CXX)
endif()

# The same for the CPU engine and the caches over it, where a program has them.
if(TARGET kvpolicy::cpu)
  add_library(kvpolicy_tool_engine STATIC EXCLUDE_FROM_ALL
              "${PROJECT_SOURCE_DIR}/compiled/program_engine.cpp"
              "${PROJECT_SOURCE_DIR}/compiled/program_cache_bfloat16.cpp")
  kvpolicy_batch_library(kvpolicy_tool_engine 2)
  target_link_libraries(kvpolicy_tool_engine
                        PUBLIC kvpolicy::cpu kvpolicy_openmp kvpolicy_tool_policies
                        PRIVATE kvpolicy_program_flags)
  add_library(kvpolicy_program_engine STATIC EXCLUDE_FROM_ALL
              "${PROJECT_SOURCE_DIR}/compiled/program_caches.cpp")
  target_link_libraries(kvpolicy_program_engine
                        PUBLIC kvpolicy_tool_engine kvpolicy_program_policies
                        PRIVATE kvpolicy_program_flags)
endif()

# kvpolicy_have(<out> <target>...): sets <out> to true if all of these targets exist.
function(kvpolicy_have out)
  set(${out} TRUE)
  foreach(target IN LISTS ARGN)
    if(NOT TARGET ${target})
      set(${out} FALSE)
    endif()
  endforeach()
  set(${out} ${${out}} PARENT_SCOPE)
endfunction()

# kvpolicy_add_program(<target> SOURCES files... [LIBS targets...] [NAME name]): makes an executable
# with our flags, or prints a line that says why it does not.
function(kvpolicy_add_program target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAME" "SOURCES;LIBS")
  kvpolicy_have(complete ${arg_LIBS})
  if(NOT complete)
    message(STATUS "kvpolicy: not building ${target}: not all of '${arg_LIBS}' are available")
    return()
  endif()
  add_executable(${target} ${arg_SOURCES})
  target_link_libraries(${target} PRIVATE kvpolicy_program_flags ${arg_LIBS})
  if(arg_NAME)
    set_target_properties(${target} PROPERTIES OUTPUT_NAME ${arg_NAME})
  endif()
endfunction()

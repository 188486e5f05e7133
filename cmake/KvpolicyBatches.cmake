# SPDX-License-Identifier: Apache-2.0
#
# Batches: several test files compiled as one, which reads each header and instantiates each template once.
# All tests are compiled in a third of the time so, but an edit compiles a whole batch. The presets have it, so that what
# a day compiles is what CI compiles, and the compiler cache gives the one to the other.
option(KVPOLICY_BATCHES "Compile tests and tools in batches of files: less in all, more after an edit" OFF)

# For scripts/test --changed: of a folder that has some of these test files, its program has them alone. Programs of other
# folders are as ever, and not built.
set(KVPOLICY_TEST_FILES "" CACHE STRING "Test files to compile alone, by their paths in the project; empty: all")

# kvpolicy_chosen_tests(<variable>): leaves those of a list of test files that this build is for.
function(kvpolicy_chosen_tests variable)
  set(chosen)
  foreach(file IN LISTS KVPOLICY_TEST_FILES)
    if("${PROJECT_SOURCE_DIR}/${file}" IN_LIST ${variable})
      list(APPEND chosen "${PROJECT_SOURCE_DIR}/${file}")
    endif()
  endforeach()
  if(chosen)
    set(${variable} ${chosen} PARENT_SCOPE)
  endif()
endfunction()

# kvpolicy_batches(<out> <name> <sources>...): files to compile in place of the sources. One is their batch: it
# includes what they include, and then each of them inside a namespace of its own, so that names of two files never
# meet; a file that opens such a namespace itself, kvpolicy::...::<its name>, goes in as it stands. What cannot lie in
# a namespace is compiled alone: a file that adds to namespace kvpolicy, specialises a template, or defines a macro.
function(kvpolicy_batches out name)
  if(NOT KVPOLICY_BATCHES)
    set(${out} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN})
  set(result)
  set(includes)
  set(bodies)
  foreach(source IN LISTS ARGN)
    cmake_path(GET source STEM stem)
    file(STRINGS "${source}" own_namespace REGEX "^namespace kvpolicy.*::${stem} {" LIMIT_COUNT 1)
    file(STRINGS "${source}" alone REGEX "^(namespace kvpolicy|template <>|#define )")
    list(REMOVE_ITEM alone "${own_namespace}")
    if(alone)
      list(APPEND result "${source}")
      continue()
    endif()
    cmake_path(GET source PARENT_PATH folder)
    file(STRINGS "${source}" own REGEX "^#include ")
    foreach(line IN LISTS own)
      string(REGEX REPLACE "^#include ([<\"][^>\"]+[>\"]).*" "\\1" header "${line}")
      string(REGEX REPLACE "[<>\"]" "" file "${header}")
      # g++ says nothing of a missing file that __has_include has asked for before.
      if(file MATCHES "^support/" AND NOT EXISTS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../tests/${file}")
        message(FATAL_ERROR "${source} includes <${file}>, which tests/ does not have")
      endif()
      if(header MATCHES "^\"" AND EXISTS "${folder}/${file}")
        kvpolicy_test_path(path "${folder}/${file}")
        set(header "\"${path}\"")
      endif()
      list(APPEND includes "${header}")
    endforeach()
    kvpolicy_test_path(path "${source}")
    if(own_namespace)
      string(APPEND bodies "\n#include \"${path}\"\n")
    else()
      string(APPEND bodies "\nnamespace ${stem} {\n#include \"${path}\"\n}\n")
    endif()
  endforeach()
  if(bodies)
    kvpolicy_write_batch(result "${name}" "${includes}" "${bodies}")
  endif()
  set(${out} ${result} PARENT_SCOPE)
endfunction()

# Sources of a batch are found in the folder tests, which all tests include: the batch's text is the same in every
# checkout, so ccache knows it again.
function(kvpolicy_test_path out path)
  cmake_path(SET tests NORMALIZE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../tests")
  cmake_path(RELATIVE_PATH path BASE_DIRECTORY "${tests}")
  set(${out} "${path}" PARENT_SCOPE)
endfunction()

# A header that a file includes under a condition may not be there.
function(kvpolicy_write_batch list name includes bodies)
  list(REMOVE_DUPLICATES includes)
  list(TRANSFORM includes REPLACE "(.+)" "#if __has_include(\\1)\n#include \\1\n#endif\n")
  string(JOIN "" text ${includes})
  # Where clang optimises (the sanitizers' build of what runs for long), it takes the headers alone: up to two fifths of the
  # compile time would go into the tests, most of whose lines run once.
  string(APPEND text "\n#ifdef __clang__\n#pragma clang optimize off\n#endif\n")
  set(file "${CMAKE_CURRENT_BINARY_DIR}/batches/${name}.cpp")
  file(CONFIGURE OUTPUT "${file}" CONTENT "${text}${bodies}" @ONLY)
  set(${list} ${${list}} "${file}" PARENT_SCOPE)
endfunction()

# kvpolicy_batch_library(<target> <files in a batch> [ALONE files...]): the same for the sources of a target that
# need no namespaces of their own; those that do, and the dearest, are compiled alone.
function(kvpolicy_batch_library target count)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "ALONE")
  if(arg_ALONE)
    set_source_files_properties(${arg_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${KVPOLICY_BATCHES} UNITY_BUILD_BATCH_SIZE ${count})
endfunction()

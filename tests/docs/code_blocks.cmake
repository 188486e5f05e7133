# SPDX-License-Identifier: Apache-2.0
#
# Checks that every C++ block of a page compiles, with our warnings as errors. The kind of a block follows
# from its code or from an HTML comment on the line before it:
#   a block with `int main` is a program, and compiled as it is;
#   <!-- code: NAME -->     the block is a fragment that may use tests/docs/prelude/NAME.hpp.
#                           The part of the prelude up to the line `// each block` is written once, the
#                           rest around each block of the page, in place of `BLOCK`;
#   <!-- part of: FILE -->  the block is a part of that program of ours, up to indentation, which is
#                           compiled and run elsewhere. A program may have this comment, too.
# Any other block is an error.
#   cmake -DPAGE=<page.md> -DSOURCE_DIR=<repository> -DCXX=<compiler> -DINCLUDES=<folder|folder>
#         -DFLAGS=<flags of the build> -DCOMPONENTS=<io|cpu|format|simt: those that are there> -DWORK=<folder>
#         -P code_blocks.cmake
cmake_minimum_required(VERSION 3.25)
string(REPLACE "|" ";" INCLUDES "${INCLUDES}")
string(REPLACE "|" ";" COMPONENTS "${COMPONENTS}")
list(REMOVE_DUPLICATES INCLUDES)
list(REMOVE_ITEM INCLUDES /usr/include)  # has its place in the search path already
list(TRANSFORM INCLUDES PREPEND "-isystem")
separate_arguments(flags UNIX_COMMAND "${FLAGS}")
list(APPEND flags -std=c++20 -fsyntax-only -Wall -Wextra -Wconversion -Wshadow -Wpedantic -Werror
    "-I${SOURCE_DIR}/include" ${INCLUDES})

file(READ "${SOURCE_DIR}/${PAGE}" rest)
file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}")
set(line 1)       # line of the first character of `rest`
set(blocks 0)
set(preludes "")  # those in use; source_NAME has the source of each
set(failed FALSE)

function(compile source what)
  execute_process(COMMAND ${CXX} ${flags} ${ARGN} "${source}"
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message("${PAGE}: ${what} does not compile:\n${output}")
    set(failed TRUE PARENT_SCOPE)
  endif()
endfunction()

while(TRUE)
  string(FIND "${rest}" "```cpp\n" begin)
  if(begin EQUAL -1)
    break()
  endif()
  string(SUBSTRING "${rest}" 0 ${begin} before)
  math(EXPR begin "${begin} + 7")
  string(SUBSTRING "${rest}" ${begin} -1 rest)
  string(FIND "${rest}" "```" end)
  string(SUBSTRING "${rest}" 0 ${end} block)
  math(EXPR end "${end} + 3")
  string(SUBSTRING "${rest}" ${end} -1 rest)
  math(EXPR blocks "${blocks} + 1")
  string(REGEX REPLACE "[^\n]" "" newlines "${before}")
  string(LENGTH "${newlines}" newlines)
  math(EXPR line "${line} + ${newlines} + 1")  # of the block's first line

  set(kind "")
  if(before MATCHES "<!-- (code|part of): ([^ ]+) -->\n$")
    set(kind "${CMAKE_MATCH_1}")
    set(name "${CMAKE_MATCH_2}")
  endif()
  if(kind STREQUAL "part of")
    file(READ "${SOURCE_DIR}/${name}" program)
    string(REGEX REPLACE "\n[ \t]+" "\n" program "\n${program}")
    string(REGEX REPLACE "\n[ \t]+" "\n" flat "\n${block}")
    string(FIND "${program}" "${flat}" found)
    if(found EQUAL -1)
      message("${PAGE}:${line}: this code does not stand in ${name}:\n${block}")
      set(failed TRUE)
    endif()
  endif()
  if(block MATCHES "int main\\(")
    set(source "${WORK}/program_${blocks}.cpp")
    file(WRITE "${source}" "#line ${line} \"${PAGE}\"\n${block}")
    compile("${source}" "the program in line ${line}")
  elseif(kind STREQUAL "code")
    if(NOT name IN_LIST preludes)
      list(APPEND preludes ${name})
      file(READ "${SOURCE_DIR}/tests/docs/prelude/${name}.hpp" prelude)
      string(FIND "${prelude}" "// each block\n" at)
      if(at EQUAL -1)
        message(FATAL_ERROR "tests/docs/prelude/${name}.hpp has no line '// each block'")
      endif()
      string(SUBSTRING "${prelude}" 0 ${at} source_${name})
      math(EXPR at "${at} + 14")
      string(SUBSTRING "${prelude}" ${at} -1 around_${name})
      set(needs_${name} "")
      if(prelude MATCHES "// needs: ([a-z ]+)\n")
        string(REPLACE " " ";" needs_${name} "${CMAKE_MATCH_1}")
      endif()
    endif()
    string(REPLACE "BLOCK" "\n#line ${line} \"${PAGE}\"\n${block}\n" around "${around_${name}}")
    string(APPEND source_${name} "namespace block_${blocks} {\n${around}\n}\n")
  elseif(NOT kind STREQUAL "part of")
    message("${PAGE}:${line}: say in front of this block what it is (tests/docs/code_blocks.cmake):\n"
            "${block}")
    set(failed TRUE)
  endif()
  string(REGEX REPLACE "[^\n]" "" newlines "${block}")
  string(LENGTH "${newlines}" newlines)
  math(EXPR line "${line} + ${newlines}")
endwhile()

foreach(name IN LISTS preludes)
  set(missing "")
  foreach(component IN LISTS needs_${name})
    if(NOT component IN_LIST COMPONENTS)
      list(APPEND missing ${component})
    endif()
  endforeach()
  if(missing)
    message("${PAGE}: fragments with the prelude ${name} are not compiled: '${missing}' is not there")
    continue()
  endif()
  set(source "${WORK}/${name}.cpp")
  file(WRITE "${source}" "${source_${name}}")
  # A fragment may leave variables unused.
  compile("${source}" "a fragment with the prelude ${name}" -Wno-unused)
endforeach()
if(blocks EQUAL 0)
  message(FATAL_ERROR "${PAGE} has no C++ block")
endif()
if(failed)
  message(FATAL_ERROR "${PAGE}: see above")
endif()
message("${PAGE}: ${blocks} blocks")

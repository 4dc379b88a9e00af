# Chooses the CUDA architectures of a build.

# Sets `result` to a value for CMAKE_CUDA_ARCHITECTURES: machine code for every architecture from
# 7.5 on that `nvcc` supports, and PTX of the newest one for later GPUs. Code for the first
# architecture of a major version runs on the others of that version (8.0 on 8.6 and 8.9), except
# for embedded chips, which have their own.
function(all_cuda_architectures nvcc result)
  supported_cuda_architectures("${nvcc}" known)
  list(GET known -1 newest)
  set(embedded 87 88 101 110)
  set(majors "")
  set(chosen "")
  foreach(arch IN LISTS known)
    math(EXPR major "${arch} / 10")
    if(arch IN_LIST embedded)
      list(APPEND chosen ${arch}-real)
    elseif(NOT major IN_LIST majors)
      list(APPEND majors ${major})
      list(APPEND chosen ${arch}-real)
    endif()
  endforeach()
  set(${result} "${chosen};${newest}-virtual" PARENT_SCOPE)
endfunction()

# Sets `result` to the architectures of this machine's GPUs; empty if there is no GPU, or if `nvcc`
# does not support one of them.
function(native_cuda_architectures nvcc result)
  set(${result} "" PARENT_SCOPE)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities RESULT_VARIABLE failed ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
  if(failed OR NOT capabilities)
    return()
  endif()
  supported_cuda_architectures("${nvcc}" known)
  set(chosen "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" arch "${capability}")
    if(NOT arch IN_LIST known)
      return()
    endif()
    list(APPEND chosen ${arch}-real)
  endforeach()
  list(REMOVE_DUPLICATES chosen)
  set(${result} "${chosen}" PARENT_SCOPE)
endfunction()

function(supported_cuda_architectures nvcc result)
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known)
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  list(FILTER known EXCLUDE REGEX "^([1-6][0-9]|7[0-4])$")
  list(SORT known COMPARE NATURAL)
  set(${result} "${known}" PARENT_SCOPE)
endfunction()

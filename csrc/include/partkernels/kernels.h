#pragma once
#include "partkernels/cuda.h"  // the new name of this header

#include "chunk_gradient.h"

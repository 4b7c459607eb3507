"""What maintainers run through make: the patches, the fork, the matrix, the generated parts of the documents."""

# For Kubernetes: docker build -t REGISTRY/d3d-ray:0.1.0 .
# Ray's image has the very Ray and Python that this package is made for; torch brings its own CUDA.
FROM rayproject/ray:2.60.0-py311-gpu

WORKDIR /home/ray/d3d-ray
COPY --chown=ray:users . .
RUN pip install --no-cache-dir '.[serve,train]'

# Never open: without a token nothing starts that others could reach.
ENV RAY_AUTH_MODE=token

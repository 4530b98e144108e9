from . import parquet_chunks as parquet_chunks
from .parquet_chunks import as_file as as_file
from .parquet_format import MAX_FOOTER_BYTES as MAX_FOOTER_BYTES, ParquetFile as ParquetFile
from .thrift import Long as Long, Raw as Raw, ThriftReader as ThriftReader
from .thrift import write_struct as write_struct

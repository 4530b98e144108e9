from .fetcher import Fetcher as Fetcher
from .scheduler import Attempt as Attempt, Call as Call, ConnectionBudget as ConnectionBudget
from .scheduler import Health as Health, Hedging as Hedging, Scheduler as Scheduler
from .scheduler import StoreRequest as StoreRequest, backoff_s as backoff_s, quantile as quantile
